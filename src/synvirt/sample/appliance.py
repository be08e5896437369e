"""The sample as an exporter would write it: an OVA with an OVF 1.x descriptor, a manifest with SHA-256, a streamOptimized VMDK.

OVF: DSP0243 of the DMTF. The tar is ustar, the descriptor first, as section 5.3 of DSP0243 wants.
"""

import hashlib
import secrets
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from synvirt.programs import run
from synvirt.sample.disk import make_disk
from synvirt.sample.pieces import cache_dir, gather
from synvirt.sizes import MIB

# Where the guest keeps the id of its sample: who reads it there, by the agent, knows that the guest runs from this very disk.
ID_PATH = "/etc/synvirt-sample"
CONVERT_TIMEOUT_S = 900
MEMORY_MIB = 256

OVF = """\
<?xml version="1.0" encoding="UTF-8"?>
<Envelope xmlns="http://schemas.dmtf.org/ovf/envelope/1" xmlns:ovf="http://schemas.dmtf.org/ovf/envelope/1"
    xmlns:rasd="http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_ResourceAllocationSettingData"
    xmlns:vssd="http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_VirtualSystemSettingData">
  <References>
    <File ovf:id="file1" ovf:href="{name}-disk1.vmdk" ovf:size="{vmdk_bytes}"/>
  </References>
  <DiskSection>
    <Info>Virtual disks</Info>
    <Disk ovf:diskId="disk1" ovf:fileRef="file1" ovf:capacity="{capacity_bytes}" ovf:capacityAllocationUnits="byte"
        ovf:format="http://www.vmware.com/interfaces/specifications/vmdk.html#streamOptimized"/>
  </DiskSection>
  <NetworkSection>
    <Info>Networks</Info>
    <Network ovf:name="VM Network"><Description>The network of the virtual machine</Description></Network>
  </NetworkSection>
  <VirtualSystem ovf:id="{name}">
    <Info>A virtual machine</Info>
    <Name>{name}</Name>
    <OperatingSystemSection ovf:id="96">
      <Info>The guest operating system</Info>
      <Description>Debian GNU/Linux 12 (64-bit)</Description>
    </OperatingSystemSection>
    <VirtualHardwareSection>
      <Info>Virtual hardware</Info>
      <System>
        <vssd:ElementName>Virtual Hardware Family</vssd:ElementName>
        <vssd:InstanceID>0</vssd:InstanceID>
        <vssd:VirtualSystemType>vmx-13</vssd:VirtualSystemType>
      </System>
      <Item>
        <rasd:AllocationUnits>hertz * 10^6</rasd:AllocationUnits>
        <rasd:ElementName>1 virtual CPU</rasd:ElementName>
        <rasd:InstanceID>1</rasd:InstanceID>
        <rasd:ResourceType>3</rasd:ResourceType>
        <rasd:VirtualQuantity>1</rasd:VirtualQuantity>
      </Item>
      <Item>
        <rasd:AllocationUnits>byte * 2^20</rasd:AllocationUnits>
        <rasd:ElementName>{memory_mib} MB of memory</rasd:ElementName>
        <rasd:InstanceID>2</rasd:InstanceID>
        <rasd:ResourceType>4</rasd:ResourceType>
        <rasd:VirtualQuantity>{memory_mib}</rasd:VirtualQuantity>
      </Item>
      <Item>
        <rasd:Address>0</rasd:Address>
        <rasd:ElementName>SCSI controller 0</rasd:ElementName>
        <rasd:InstanceID>3</rasd:InstanceID>
        <rasd:ResourceSubType>lsilogic</rasd:ResourceSubType>
        <rasd:ResourceType>6</rasd:ResourceType>
      </Item>
      <Item>
        <rasd:AddressOnParent>0</rasd:AddressOnParent>
        <rasd:ElementName>Hard disk 1</rasd:ElementName>
        <rasd:HostResource>ovf:/disk/disk1</rasd:HostResource>
        <rasd:InstanceID>4</rasd:InstanceID>
        <rasd:Parent>3</rasd:Parent>
        <rasd:ResourceType>17</rasd:ResourceType>
      </Item>
      <Item>
        <rasd:AddressOnParent>7</rasd:AddressOnParent>
        <rasd:AutomaticAllocation>true</rasd:AutomaticAllocation>
        <rasd:Connection>VM Network</rasd:Connection>
        <rasd:ElementName>Network adapter 1</rasd:ElementName>
        <rasd:InstanceID>5</rasd:InstanceID>
        <rasd:ResourceSubType>VmxNet3</rasd:ResourceSubType>
        <rasd:ResourceType>10</rasd:ResourceType>
      </Item>
    </VirtualHardwareSection>
  </VirtualSystem>
</Envelope>
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """`id`: what the guest has in ID_PATH. `raw`: its disk as it must arrive, where it was asked for."""

    ova: Path
    id: str
    capacity_bytes: int
    raw: Path | None = None


def build(folder: Path, *, payload_mib: int = 64, name: str = "synvirt-sample", keep_raw: bool = False) -> Sample:
    """Make `{folder}/{name}.ova`, whole or not at all. SynvirtError, with the package that is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    pieces = gather(cache_dir())
    sample_id = secrets.token_hex(8)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder) as scratch:
        work = Path(scratch)
        raw, vmdk = work / f"{name}.raw", work / f"{name}-disk1.vmdk"
        make_disk(raw, pieces, sample_id=sample_id, payload_bytes=payload_mib * MIB, work=work)
        convert = ["qemu-img", "convert", "-f", "raw", "-O", "vmdk", "-o", "subformat=streamOptimized", str(raw), str(vmdk)]
        run(convert, timeout_s=CONVERT_TIMEOUT_S)
        capacity_bytes = raw.stat().st_size
        ovf = work / f"{name}.ovf"
        ovf.write_text(
            OVF.format(name=name, vmdk_bytes=vmdk.stat().st_size, capacity_bytes=capacity_bytes, memory_mib=MEMORY_MIB)
        )
        manifest = work / f"{name}.mf"
        manifest.write_text("".join(f"SHA256({path.name})= {_sha256(path)}\n" for path in (ovf, vmdk)))
        partial = work / f"{name}.ova"
        with tarfile.open(partial, "w", format=tarfile.USTAR_FORMAT) as archive:
            for member in (ovf, manifest, vmdk):
                archive.add(member, member.name)
        ova = folder / f"{name}.ova"
        partial.rename(ova)
        kept = raw.rename(folder / f"{name}.raw") if keep_raw else None
    return Sample(ova, sample_id, capacity_bytes, kept)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
