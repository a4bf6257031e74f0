"""What one launch takes: replayed Triton kernels, counted Ascend C kernels."""
