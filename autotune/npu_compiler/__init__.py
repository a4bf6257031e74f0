"""The NPU's compiler on a machine without an NPU: what the compiler gate and the model of its time both read.

- `npu_compiler.compile` compiles a kernel to the compiler's last module;
- `npu_compiler.cache` keeps results of compilers on disk;
- `npu_compiler.stages` keeps a kernel's IR at every stage;
- `npu_compiler.socs` lists the chips.
"""
