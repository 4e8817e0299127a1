"""What scripts/gpu_check does on the day a GPU is there, and what it expects from counting on paper."""
