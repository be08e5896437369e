"""Records: frozen data classes that compile no methods.

`dataclasses.dataclass` writes up to six methods for each class as source and compiles them, a third of a millisecond a class. A
worker needs 60 classes before it reads its first byte, and `synvirt disk` 40: that was a quarter of their start. And to load
`dataclasses` takes as long as the start of Python itself. Records share the methods of `Record`. In all else a record is a data
class: `dataclasses.fields`, `replace`, `is_dataclass` and pydantic take it for one; what they look at is made when they ask.
"""

from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, ClassVar, Final, NamedTuple, NoReturn, TypeVar, cast, dataclass_transform

# The default of a field that has none.
_NONE: Final[Any] = object()


class _Field(NamedTuple):
    """What `field` says of a field, and its annotation."""

    default: Any = _NONE
    default_factory: Callable[[], Any] | None = None
    repr: bool = True
    compare: bool = True
    annotation: Any = None

    def value(self) -> Any:
        """The field's value where none is given; _NONE, where one must be."""
        return self.default if self.default_factory is None else self.default_factory()


def field(
    *,
    default: Any = _NONE,
    default_factory: Callable[[], Any] | None = None,
    repr: bool = True,  # noqa: A002 - as dataclasses call it
    compare: bool = True,
) -> Any:
    """`dataclasses.field`, for records."""
    return _Field(default, default_factory, repr, compare)


@cache
def _alike(made: Any) -> type:
    """A data class with the record's fields."""
    from dataclasses import dataclass, field

    annotations = {name: each.annotation for name, each in made._fields.items()}
    content: dict[str, Any] = {"__doc__": made.__doc__, "__annotations__": annotations}
    for name, each in made._fields.items():
        options: dict[str, Any] = {"repr": each.repr, "compare": each.compare}
        if each.default_factory is not None:
            options["default_factory"] = each.default_factory
        elif each.default is not _NONE:
            options["default"] = each.default
        content[name] = field(**options)
    return dataclass(init=False, repr=False, eq=False, kw_only=True)(type(made.__name__, (), content))


class _DataClass:
    """An attribute by which others know a data class."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, made: "type[Record]") -> Any:
        return getattr(_alike(cast(Hashable, made)), self._name)


class _Signature:
    """A record's fields as the parameters of its `__init__`, for `inspect` and `help`."""

    def __get__(self, instance: object, made: "type[Record]") -> Any:
        from inspect import Parameter, Signature

        def parameter(name: str, of: _Field) -> Parameter:
            default = of.value()
            shown = Parameter.empty if default is _NONE else default
            return Parameter(name, Parameter.KEYWORD_ONLY, default=shown, annotation=of.annotation)

        return Signature([parameter(name, each) for name, each in made._fields.items()])


@dataclass_transform(kw_only_default=True, frozen_default=True, eq_default=True, field_specifiers=(field,))
class _RecordType(type):
    """Makes a record of a class with annotated fields. A class has its slots from the beginning: a decorator would have to make
    each class a second time, which costs as much again."""

    def __new__(cls, name: str, bases: tuple[type, ...], content: dict[str, Any]) -> "_RecordType":
        inherited: dict[str, _Field] = {}
        for base in reversed(bases):
            inherited |= getattr(base, "_fields", {})
        own: dict[str, _Field] = {}
        for each, annotation in content.get("__annotations__", {}).items():
            if getattr(annotation, "__origin__", None) is not ClassVar:
                given = content.pop(each, _NONE)
                own[each] = _Field(*given[:4], annotation) if type(given) is _Field else _Field(given, annotation=annotation)
        content["_fields"] = inherited | own
        content["__slots__"] = tuple(each for each in own if each not in inherited)
        return super().__new__(cls, name, bases, content)


class Record(metaclass=_RecordType):
    """What all records have. Fields are given by name; two records are equal if they are of one class and all fields that are
    compared are equal."""

    _fields: ClassVar[dict[str, _Field]] = {}
    __signature__: ClassVar[Any] = _Signature()
    __dataclass_fields__: ClassVar[dict[str, Any]] = _DataClass()  # type: ignore[assignment]
    __dataclass_params__: ClassVar[Any] = _DataClass()

    def __init__(self, **given: Any) -> None:
        for name, each in self._fields.items():
            value = given.pop(name) if name in given else each.value()
            if value is _NONE:
                raise TypeError(f"{type(self).__name__} lacks {name!r}")
            object.__setattr__(self, name, value)
        if given:
            raise TypeError(f"{type(self).__name__} has no {', '.join(map(repr, given))}")

    def _compared(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name, each in self._fields.items() if each.compare)

    def __eq__(self, other: object) -> bool:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return self._compared() == other._compared()

    def __hash__(self) -> int:
        return hash(self._compared())

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name, each in self._fields.items() if each.repr)
        return f"{type(self).__qualname__}({shown})"

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        from dataclasses import FrozenInstanceError

        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        from dataclasses import FrozenInstanceError

        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def __setstate__(self, state: tuple[None, dict[str, Any]]) -> None:
        """For `copy`, which would set attributes."""
        for name, value in state[1].items():
            object.__setattr__(self, name, value)


# Down here: for a name in quotes Python's compiler would build its classes for syntax trees, which takes a millisecond.
R = TypeVar("R", bound=Record)


def replace(one: R, **changes: Any) -> R:
    """The record with other values in some fields."""
    return type(one)(**{name: getattr(one, name) for name in one._fields} | changes)
