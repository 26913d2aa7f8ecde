"""Retraining: gradient steps on labels, on a teacher's answers or on both, with checkpoints to resume from."""
