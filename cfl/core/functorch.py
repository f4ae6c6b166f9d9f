"""Whether a `torch.func` transform is running, by a private function of torch: setup.cfg bounds torch for that."""

from torch._C._functorch import peek_interpreter_stack


def transforming() -> bool:
    """True inside a `torch.func` transform; callers take a faster way outside."""
    return peek_interpreter_stack() is not None
