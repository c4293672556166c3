"""Every exception this library raises on purpose."""


class ForewordError(Exception):
    """Base class of all errors raised by Foreword itself."""


class ModelLoadError(ForewordError):
    """A model could not be found, read or recognised; the message names the file and the reason."""


class PromptTooLongError(ForewordError, ValueError):
    """A prompt exceeds the model's context or the KV memory; the message names both lengths."""


class EngineClosedError(ForewordError, RuntimeError):
    """The engine was used after ``close()`` or from a forked child process."""


class RequestFailedError(ForewordError, RuntimeError):
    """A request was accepted but failed while it ran; the cause is chained."""
