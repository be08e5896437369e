"""Records: frozen data classes that compile no methods.

`dataclasses.dataclass` writes up to six methods for each class as source and compiles them, a third of a millisecond a class. A
worker needs 60 classes before it reads its first byte, and `synvirt disk` 40: that was a quarter of their start. Records share
the methods of `Record`. In all else a record is a data class: `fields`, `replace`, `is_dataclass` and pydantic take it for one.
"""

from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field, fields
from typing import Any, ClassVar, NoReturn, TypeVar, dataclass_transform

T = TypeVar("T")


class _Signature:
    """A record's fields as the parameters of its `__init__`, for `inspect` and `help`."""

    def __get__(self, instance: object, made: "type[Record]") -> Any:
        from inspect import Parameter, Signature

        def parameter(of: Field[Any]) -> Parameter:
            default = of.default if of.default_factory is MISSING else of.default_factory()
            shown = Parameter.empty if default is MISSING else default
            return Parameter(of.name, Parameter.KEYWORD_ONLY, default=shown, annotation=of.type)

        return Signature([parameter(each) for each in fields(made)])


class Record:
    """What all records have. Fields are given by name; two records are equal if they are of one class and all fields that are
    compared are equal."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    __signature__: ClassVar[Any] = _Signature()

    def __init__(self, **given: Any) -> None:
        for each in fields(self):
            if each.name in given:
                value = given.pop(each.name)
            elif each.default is not MISSING:
                value = each.default
            elif each.default_factory is not MISSING:
                value = each.default_factory()
            else:
                raise TypeError(f"{type(self).__name__} lacks {each.name!r}")
            object.__setattr__(self, each.name, value)
        if given:
            raise TypeError(f"{type(self).__name__} has no {', '.join(map(repr, given))}")

    def _compared(self) -> tuple[Any, ...]:
        return tuple(getattr(self, each.name) for each in fields(self) if each.compare)

    def __eq__(self, other: object) -> bool:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return self._compared() == other._compared()

    def __hash__(self) -> int:
        return hash(self._compared())

    def __repr__(self) -> str:
        shown = ", ".join(f"{each.name}={getattr(self, each.name)!r}" for each in fields(self) if each.repr)
        return f"{type(self).__qualname__}({shown})"

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def __setstate__(self, state: tuple[None, dict[str, Any]]) -> None:
        """For `copy`, which would set attributes."""
        for name, value in state[1].items():
            object.__setattr__(self, name, value)


@dataclass_transform(kw_only_default=True, frozen_default=True, eq_default=True, field_specifiers=(field,))
def record(made: type[T]) -> type[T]:
    """Makes a record of a subclass of `Record` with annotated fields."""
    return dataclass(init=False, repr=False, eq=False, slots=True, kw_only=True)(made)
