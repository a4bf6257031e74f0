"""What Ascend C kernels do, as a build of them says it that counts (``emulation/counting_core.h``)."""
