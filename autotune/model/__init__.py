"""What a plan costs on a machine: constants, kernel costs, timelines, clusters (docs/model.md).

It looks at plans and kernels; nothing that runs looks at it.
"""
