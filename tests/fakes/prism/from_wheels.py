"""Writes v4.json: the facts of Nutanix' v4 API that our stand-in is checked against, read from the vendor's own SDK.

    python -m venv V; V/bin/pip install ntnx-vmm-py-client==4.3.2 …
    python tests/fakes/prism/from_wheels.py V/lib/python3.11/site-packages

Paths, fields, types, enums and what is required; no code, no descriptions. Run it again for another version of the SDK.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

WHEELS = {
    "vmm": "4.3.2",
    "dataprotection": "4.4.2",
    "prism": "4.4.2",
    "clustermgmt": "4.3.2",
    "volumes": "4.3.2",
    "networking": "4.4.2",
    "iam": "4.0.1",
}
# What the adapter asks, and what an operator's own client asks in the same flows.
WANTED = """
vmm GET ahv/config/vms | vmm GET,PUT ahv/config/vms/{extId}
vmm POST ahv/config/vms/{extId}/$actions/power-on | vmm POST ahv/config/vms/{extId}/$actions/power-off
vmm POST ahv/config/vms/{extId}/$actions/shutdown | vmm POST ahv/config/vms/{extId}/$actions/guest-shutdown
vmm GET,POST content/images | vmm GET,DELETE content/images/{extId} | vmm GET content/images/{imageExtId}/file
dataprotection GET,POST config/recovery-points | dataprotection GET,DELETE config/recovery-points/{extId}
dataprotection POST config/recovery-points/{extId}/$actions/discover-cluster
dataprotection POST DISK_POINT/$actions/compute-changed-regions
prism GET config/tasks | prism GET config/tasks/{extId}
clustermgmt GET config/clusters | clustermgmt GET config/clusters/{extId} | clustermgmt GET config/storage-containers
networking GET config/subnets
iam GET authn/users | iam GET authz/authorization-policies | iam GET authz/roles
volumes GET,POST config/volume-groups | volumes GET,DELETE config/volume-groups/{extId}
volumes GET,POST config/volume-groups/{volumeGroupExtId}/disks
volumes POST config/volume-groups/{extId}/$actions/attach-iscsi-client
volumes POST config/volume-groups/{extId}/$actions/detach-iscsi-client
volumes GET config/volume-groups/{volumeGroupExtId}/external-iscsi-attachments
"""

DISK_POINT = (
    "content/recovery-points/{recoveryPointExtId}/vm-recovery-points/{vmRecoveryPointExtId}/disk-recovery-points/{extId}"
)


def operations(packages: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for namespace in WHEELS:
        for file in sorted((packages / f"ntnx_{namespace}_py_client" / "api").glob("*_api.py")):
            for method in re.split(r"\n    def ", file.read_text())[1:]:
                if not (call := re.search(r"_call_api\(\s*'/api/[^/]+/(v4\.\d+)/([^']+)', '(\w+)'", method)):
                    continue
                answer = re.search(r"response_type='([^']+)'", method)
                body = re.search(r":param body:.*?:type body:\s+:class:`~([\w.]+)`", method, re.DOTALL)
                found[f"{namespace} {call[3]} {call[2]}"] = {
                    "query": sorted(set(re.findall(r"query_params\.append\(\('([^']+)'", method))),
                    "body": body[1].split(".models.")[-1] if body else None,
                    "returns": answer[1] if answer else None,
                }
    return found


def type_of(models: Path, name: str) -> dict[str, Any]:
    text = (models / (name.replace(".", "/") + ".py")).read_text()
    if "_UNKNOWN = " in text:
        return {"enum": re.findall(r'^    [A-Z_0-9]+ = "([^"$]+)"', text, re.MULTILINE)}
    if (choices := re.search(r"discriminator_value_class_map = \{(.*?)\}", text, re.DOTALL)) is not None:
        return {"one_of": re.findall(r"'[^']+': '([^']+)'", choices[1])}
    types = re.search(r"swagger_types = \{(.*?)\n    \}", text, re.DOTALL)
    names = re.search(r"attribute_map = \{(.*?)\n    \}", text, re.DOTALL)
    assert types is not None
    assert names is not None
    spelled = dict(re.findall(r"'(\w+)': '([^']+)'", names[1]))
    fields = [(name, kind) for name, kind in re.findall(r"'(\w+)': '([^']+)'", types[1]) if not name.startswith("_")]
    required = [spelled[name] for name, _ in fields if re.search(rf":type {name}: required", text)]
    return {"props": {spelled[name]: kind for name, kind in fields}, **({"required": required} if required else {})}


def main(packages: Path) -> None:
    known = operations(packages)
    chosen: dict[str, Any] = {}
    for line in WANTED.replace("DISK_POINT", DISK_POINT).replace("\n", "|").split("|"):
        if line.strip():
            namespace, methods, path = line.split()
            for method in methods.split(","):
                chosen[f"{namespace} {method} {path}"] = known[f"{namespace} {method} {path}"]
    types: dict[str, Any] = {}
    for operation, shape in chosen.items():
        models = packages / f"ntnx_{operation.split()[0]}_py_client" / "models"
        todo = [one for one in (shape["body"], shape["returns"]) if one]
        while todo:
            name = todo.pop()
            if name in types or not (models / (name.replace(".", "/") + ".py")).exists():
                continue
            types[name] = type_of(models, name)
            # An entity that a VM or a task only names is not followed: what the flows do not look at stays an object.
            inner = [*types[name].get("props", {}).values(), *types[name].get("one_of", [])]
            todo += [part for kind in inner for part in re.findall(r"[\w.]+\.[\w.]+", kind)]
    source = {
        "source": "Nutanix v4 API, read from the vendor's SDK for Python on PyPI",
        "licence": "Apache-2.0",
        "wheels": {f"ntnx-{name}-py-client": version for name, version in WHEELS.items()},
    }
    where = Path(__file__).with_name("v4.json")
    lines = [f"{json.dumps(name)}: {json.dumps(shape, separators=(',', ':'))}" for name, shape in sorted(types.items())]
    operations_ = [f"{json.dumps(name)}: {json.dumps(shape)}" for name, shape in chosen.items()]
    where.write_text(
        f'{{"about": {json.dumps(source)},\n"operations": {{\n'
        + ",\n".join(operations_)
        + '},\n"types": {\n'
        + ",\n".join(lines)
        + "}}\n"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
