"""The CPU back end on aarch64, in qemu's emulation of one: `make test-aarch64`.

qemu computes as an Arm processor does and does not order memory as one does: what passes here says nothing of
order, nor what hangs (docs/aarch64.md).
"""
