"""The methods by name: those of this folder, and those that other packages register."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, TypeVar

from hf_posenc.errors import UnknownNameError, UnknownOptionError
from hf_posenc.utils.registries import Registry
from hf_posenc.utils.warning import warn_user

if TYPE_CHECKING:
    from hf_posenc.methods.base import Method

DEFAULT_METHOD = "yarn"
# Where another package names its modules of methods, in its pyproject.toml.
ENTRY_POINTS = "hf_posenc.methods"
_PACKAGES = ("hf_posenc.methods", "hf_posenc.methods.encodings")
_NO_METHODS = frozenset({"base", "explained", "options", "registry", "formulas", "modules", "encodings"})
METHODS: Registry[type[Method]] = Registry("method", *_PACKAGES, without=_NO_METHODS)

MethodT = TypeVar("MethodT", bound="type[Method]")


def register_method(cls: MethodT) -> MethodT:
    """Make a class of method known under its name and aliases; a decorator.

    Raises:
        ValueError: A name is taken.
    """
    METHODS.add(cls, (cls.name, *cls.aliases), cls)
    methods.cache_clear()
    return cls


@cache
def methods() -> dict[str, type[Method]]:
    """Return all methods by name: static, staged, those of distances, encodings; then by name."""
    from hf_posenc.methods.base import DistanceMethod, Encoding, StagedMethod, StaticMethod

    import_other_packages()
    kinds = (StaticMethod, StagedMethod, DistanceMethod, Encoding)

    def order(cls: type[Method]) -> tuple[int, str]:
        return next(at for at, kind in enumerate(kinds) if issubclass(cls, kind)), cls.name

    return {cls.name: cls for cls in sorted(METHODS.all().values(), key=order)}


@cache
def import_other_packages() -> None:
    """Import the modules of methods that installed packages name, once."""
    METHODS.import_all()
    for point in entry_points(group=ENTRY_POINTS):
        try:
            point.load()
        except Exception as error:  # whatever a package of somebody else trips over
            warn_user(f"the methods of {point.value!r} cannot be used: {type(error).__name__}: {error}")


def get_method(name: str) -> type[Method]:
    """Look a method up by name or alias.

    Raises:
        ValueError: It is unknown; the nearest known name is suggested.
    """
    key = name.lower().replace("-", "_") if isinstance(name, str) else name
    by_name = {each: cls for cls in methods().values() for each in (cls.name, *cls.aliases)}
    if key not in by_name:
        raise UnknownNameError("method", name, sorted(by_name), key)
    return by_name[key]


def method_names(attribute: str) -> frozenset[str]:
    """Return the names of the methods for which a class attribute, such as ``is_encoding``, is true."""
    return frozenset(name for name, cls in methods().items() if getattr(cls, attribute))


def make_method(name: str, factor: float = 1.0, options: Mapping[str, Any] | None = None) -> Method:
    """Return a method at a factor, its options checked.

    Raises:
        TypeError: The method does not take an option, or a value is of the wrong type.
        ValueError: The method is unknown or a value is out of range.
    """
    cls, options = get_method(name), options or {}
    _check_names(cls, options)
    return cls(factor, **options)


def read_method(name: str, factor: float, options: Mapping[str, Any]) -> Method:
    """Return a method as a config or a record has it: values are not checked, as ``Method.as_read`` explains.

    Raises:
        TypeError: The method does not take an option.
        ValueError: The method is unknown.
    """
    cls = get_method(name)
    _check_names(cls, options)
    return cls.as_read(factor, options)


def _check_names(cls: type[Method], options: Mapping[str, Any]) -> None:
    known = cls.option_fields()
    for option in options:
        if option not in known:
            takers = [other.name for other in methods().values() if option in other.option_fields()]
            raise UnknownOptionError(cls.name, option, sorted(known), takers)


def method_of_rope_type(rope_type: str | None) -> type[Method] | None:
    """Return the method that a ``rope_type`` of Transformers is read back as; None if there is none."""
    return next((cls for cls in methods().values() if cls.rope_type is not None and cls.rope_type == rope_type), None)


def named_options(method: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those options that names of rows say; all of a method that is not known here."""
    known = methods()[method].option_fields() if method in methods() else {}
    return {name: value for name, value in options.items() if name not in known or known[name].metadata["in_names"]}


def available_methods() -> list[dict[str, Any]]:
    """Return the table of methods as rows: name, aliases, summary, paper, options, on_disk."""
    return [
        {
            "name": cls.name,
            "aliases": list(cls.aliases),
            "summary": cls.summary,
            "paper": cls.paper,
            "options": sorted(cls.option_fields()),
            "on_disk": cls.on_disk,
        }
        for cls in methods().values()
    ]
