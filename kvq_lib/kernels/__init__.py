"""What runs on tensors: `reference` in PyTorch."""
