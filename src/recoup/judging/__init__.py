"""Judging: images held out of every fit, the harm done to outputs there, and bounds on what is lost elsewhere."""
