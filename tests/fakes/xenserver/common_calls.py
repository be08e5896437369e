"""The calls that every class of XenAPI has: get, set, add, remove and destroy."""

from typing import Any

from tests.fakes.xenserver import model
from tests.fakes.xenserver.model import Failure, Message

Record = dict[str, Any]


def at(table: dict[str, Record], kind: str, ref: str) -> Record:
    """The record of that reference. Failure."""
    found = table.get(ref)
    if found is None:
        raise Failure("HANDLE_INVALID", kind, ref)
    return found


def void(message: Message) -> Any:
    """What a call answers that has nothing to answer."""
    return "" if message.result == "void" else model.empty(message.result)


def carried_out(table: dict[str, Record], message: Message, parameters: list[Any]) -> Any:  # noqa: C901 - a table
    """The answer of a call that every class has, on the class's table. Failure."""
    kind, _, name = message.name.partition(".")
    if name == "get_all_records":
        return {ref: dict(record) for ref, record in table.items()}
    if name == "get_all":
        return list(table)
    if name in ("get_by_uuid", "get_by_name_label"):
        found = [ref for ref, record in table.items() if record.get(name.removeprefix("get_by_")) == parameters[0]]
        if name == "get_by_name_label":
            return found
        if not found:
            raise Failure("UUID_INVALID", kind, parameters[0])
        return found[0]
    record = at(table, kind, parameters[0])
    if name == "get_record":
        return dict(record)
    verb, _, field = name.partition("_")
    match verb, field:
        case "get", _ if field in record:
            return record[field]
        case "set", _ if field in record:
            record[field] = parameters[1]
        case "add", _:
            record_field = record[field.removeprefix("to_")]
            if parameters[1] in record_field:
                raise Failure("MAP_DUPLICATE_KEY", kind, field.removeprefix("to_"), record["uuid"], parameters[1])
            record_field[parameters[1]] = parameters[2]
        case "remove", _:
            record[field.removeprefix("from_")].pop(parameters[1], None)
        case "destroy", "":
            del table[parameters[0]]
        case _:
            raise Failure("NOT_IMPLEMENTED", message.name)
    return void(message)
