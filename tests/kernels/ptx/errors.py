"""What the interpreter raises."""


class PtxError(RuntimeError):
    """A kernel did something undefined; the message names the thread and the source line."""


class Unsupported(PtxError):
    """An instruction, or a form of one, that the interpreter does not know."""
