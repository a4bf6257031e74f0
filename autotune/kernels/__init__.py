"""Kernels' settings as tasks: which kernels plans launch, and what a candidate of one costs.

- `kernels.scope`: machine and sizes that are asked for;
- `kernels.tunables`: the kernels with a space in the plans of these sizes, each once, with its launches;
- `kernels.feasible`: whether the NPU's compiler makes of a candidate what it asks for;
- `kernels.modelled`, `kernels.measured`: what a candidate takes, by replay or by stop-watch.
"""
