"""What a plan costs on a machine: constants, bodies, timelines, clusters (docs/model.md).

It looks at plans and kernels; nothing that runs looks at it.
"""
