"""The version of the package. pyproject.toml alone states it; an installation keeps it as metadata."""

from importlib import metadata

try:
    VERSION = metadata.version("asyncengine")
except metadata.PackageNotFoundError:  # a checkout on the path that nobody installed
    VERSION = "unknown"
