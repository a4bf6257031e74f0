"""The NPU back end: Triton-Ascend and Ascend C kernels on A2 and A3."""
