"""What every test runs under."""

import torch

# Small tensors: threads would spend their time waiting for each other.
torch.set_num_threads(1)
