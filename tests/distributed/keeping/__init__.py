"""A scheme with a kernel of its own, which no file of the package or of its kernels names."""
