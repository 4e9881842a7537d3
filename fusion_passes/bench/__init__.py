"""Measurements on the user's machine: fused against stock torch.compile."""
