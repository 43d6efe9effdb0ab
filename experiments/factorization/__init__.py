"""Low-rank factorizations W = U V^T fitted by many update rules at many learning rates: sensing and completion."""
