"""The exceptions a user may see. Each message is a sentence that says what is wrong, where, and what to do."""


class KvCompileError(Exception):
    """Base of all errors that the command line prints without a traceback."""


class CheckpointError(KvCompileError):
    """A source checkpoint that is missing, incomplete, corrupt or not finite."""


class SchemeError(KvCompileError):
    """An unknown scheme, an invalid scheme file, or a scheme that does not fit the model."""


class UnsupportedArchitectureError(KvCompileError):
    """A model whose attention kvcompile does not know how to compile."""


class CalibrationError(KvCompileError):
    """Calibration text that cannot be used, or statistics that are not finite."""


class OutputError(KvCompileError):
    """An output path that exists, cannot be written, or has no room."""


class ArtifactError(KvCompileError):
    """A converted directory that is incomplete, altered, or from a newer schema."""


class VerificationError(KvCompileError):
    """A converted checkpoint whose numbers do not agree with its source."""


class RotationError(KvCompileError):
    """A file of rotations that cannot be read, or does not fit the model."""


class ExportError(KvCompileError):
    """An export that a target refuses, options that do not fit it, or a folder that cannot be written."""


class PassError(KvCompileError):
    """A pass whose precondition or postcondition does not hold."""


class CacheError(KvCompileError):
    """A use of the packed cache that it cannot serve."""
