"""Whether a `torch.func` transform is running, by a private function of torch, or a fallback without it."""

try:
    from torch._C._functorch import peek_interpreter_stack
except ImportError:  # a later torch may rename it: setup.cfg bounds torch for that reason
    peek_interpreter_stack = None  # type: ignore[assignment]


def transforming() -> bool:
    """True inside a `torch.func` transform, and if torch cannot tell.

    Callers take a faster way outside transforms, so a wrong True costs time and changes no result.
    """
    return peek_interpreter_stack is None or peek_interpreter_stack() is not None
