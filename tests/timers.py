"""Timers and clocks that do not depend on the machine: seconds are a known function of the work that is done."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode


class Counted(TorchDispatchMode):
    """Calls of layers, and elements that pointwise operations make."""

    def __init__(self):
        super().__init__()
        self.layers, self.elements = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.layers += func._overloadpacket.__name__ in ("convolution", "addmm", "mm", "bmm")
        self.elements += result.numel() if torch.Tag.pointwise in func.tags else 0
        return result


class Work:
    """A second for every multiply-accumulate, `layer` more for every layer, `element` for every pointwise result."""

    def __init__(self, layer=0.0, element=0.0):
        self.layer, self.element = layer, element

    def __call__(self, run, device):
        with torch.no_grad(), FlopCounterMode(display=False) as flops, Counted() as counted:
            run()
        return flops.get_total_flops() / 2 + self.layer * counted.layers + self.element * counted.elements


class Ticking:
    """A clock, in the place of the module `time`, that goes on by `step` seconds whenever it is read."""

    def __init__(self, step):
        self.step, self.now = step, 0.0

    def perf_counter(self):
        self.now += self.step
        return self.now
