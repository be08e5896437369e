"""The manifests and the domain XML of restore points, parsed in a confined child of the looker.

Anyone with a repository's key can write a hostile manifest, and a peer fills its own folder.
The service decrypts a manifest and checks its signature, which parses nothing. A child without key or file parses the rest.

    CagedPoints     the service's side: `manifest.Reading`, and `domain_xml`
    answered        the child's side

A question about several manifests goes to one child: they are of one repository, or of one peer. A point that is restored is
asked about alone, so its child has parsed no other point's manifest before.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar
from uuid import UUID
from xml.etree.ElementTree import Element

from pydantic import BaseModel, ValidationError

from synvirt import xml_document
from synvirt.errors import Internal, MalformedArchive, RepositoryDamaged, SynvirtError
from synvirt.jobs.inspecting.look import Look, ReaderKilled
from synvirt.repository import manifest as manifests
from synvirt.repository.manifest import Manifest, Shown, Unread

# JSON of a small file takes milliseconds.
WITHIN_S = 60.0
_WHAT_XML = "the restore point's domain XML"
# As xml_document has it, which the child keeps to.
_DEPTH_MAX = 100

Model = TypeVar("Model", bound=BaseModel)


class Asking(Protocol):
    """Has `ask`, as CagedLooking."""

    def ask(self, look: Look) -> Any: ...


class CagedPoints:
    """Safe from several threads."""

    def __init__(self, looking: Asking) -> None:
        self._looking = looking

    def manifests(self, many: Sequence[Unread]) -> list[Manifest | SynvirtError]:
        """The manifests. Their signatures and hashes are those that the service itself has found."""
        return [
            found if isinstance(found, SynvirtError) else found.read_from(one)
            for one, found in zip(many, self._read("manifests", many, Manifest, lambda found: found.shown.id), strict=True)
        ]

    def shown(self, many: Sequence[Unread]) -> list[Shown | SynvirtError]:
        return self._read("shown", many, Shown, lambda found: found.id)

    def domain_xml(self, text: str) -> Element:
        """The root element. RepositoryDamaged."""
        look = Look("domain_xml", None, _WHAT_XML, WITHIN_S, contents=(text.encode(errors="surrogatepass"),))
        try:
            return _element(self._looking.ask(look))
        except MalformedArchive as error:
            raise RepositoryDamaged(error.detail, hint=error.hint) from error

    def _read(
        self, what: str, many: Sequence[Unread], model: type[Model], id_of: Callable[[Model], UUID]
    ) -> list[Model | SynvirtError]:
        if not many:
            return []
        name = f"the manifest of restore point {many[0].point_id}" if len(many) == 1 else f"{len(many)} manifests"
        contents = tuple(part for one in many for part in (one.point_id.encode(), one.shown, one.inside or b""))
        try:
            answers = self._looking.ask(Look(what, None, name, WITHIN_S, contents=contents))
        except (MalformedArchive, ReaderKilled) as error:
            if len(many) == 1:
                return [error if isinstance(error, ReaderKilled) else RepositoryDamaged(error.detail, hint=error.hint)]
            # One of them ended the child: now each is parsed alone.
            return [found for one in many for found in self._read(what, [one], model, id_of)]
        if not isinstance(answers, list) or len(answers) != len(many):
            raise _nonsense()
        return [_believed(one, answer, model, id_of) for one, answer in zip(many, answers, strict=True)]


def _believed(one: Unread, answer: Any, model: type[Model], id_of: Callable[[Model], UUID]) -> Model | SynvirtError:
    match answer:
        case {"damaged": str(why)}:
            return RepositoryDamaged(why)
        case str():
            try:
                found = model.model_validate_json(answer)
            except ValidationError as error:
                raise _nonsense() from error
            if str(id_of(found)) == one.point_id:
                return found
    raise _nonsense()


def _element(found: Any, depth: int = 1) -> Element:
    """The element that `_tree` has written. Internal, if it is malformed."""
    try:
        tag, attributes, text, tail, children = found
        words = [tag, *attributes.keys(), *attributes.values(), "" if text is None else text, "" if tail is None else tail]
    except (TypeError, ValueError, AttributeError) as error:
        raise _nonsense() from error
    if depth > _DEPTH_MAX or not all(isinstance(word, str) for word in words) or not isinstance(children, list):
        raise _nonsense()
    element = Element(tag, attributes)
    element.text, element.tail = text, tail
    element.extend([_element(child, depth + 1) for child in children])
    return element


def _nonsense() -> Internal:
    return Internal(
        "the process that read a restore point gave an answer that no reader gives",
        hint="the point may be an attack: report it",
    )


# ── the child ────────────────────────────────────────────────────────────────────────────────────────────────────────


def answered(what: str, contents: tuple[bytes, ...]) -> str:
    """The answer as JSON. RepositoryDamaged, for wrong XML."""
    if what == "domain_xml":
        return json.dumps(
            _tree(xml_document.parse(contents[0].decode(errors="surrogatepass"), _WHAT_XML, wrong=RepositoryDamaged))
        )
    parts = iter(contents)
    many = [Unread(point_id.decode(), shown, inside) for point_id, shown, inside in zip(parts, parts, parts, strict=True)]
    read = manifests.HERE.manifests(many) if what == "manifests" else manifests.HERE.shown(many)
    return json.dumps([{"damaged": one.detail} if isinstance(one, SynvirtError) else one.model_dump_json() for one in read])


def _tree(element: Element) -> list[Any]:
    return [element.tag, element.attrib, element.text, element.tail, [_tree(child) for child in element]]
