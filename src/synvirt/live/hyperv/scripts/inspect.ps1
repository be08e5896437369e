# One VM, as its manifest is made of.
param([guid]$VmId)

$vm = Get-SynVirtVM -VmId $VmId
$system = Get-SynVirtSystem -VmId $VmId
$realized = Get-CimAssociatedInstance -InputObject $system -ResultClassName Msvm_VirtualSystemSettingData |
    Where-Object -Property VirtualSystemType -EQ -Value 'Microsoft:Hyper-V:System:Realized' | Select-Object -First 1
$memory = Get-VMMemory -VM $vm
$processor = Get-VMProcessor -VM $vm
$firmware = @{ secure_boot = $false; template = ''; boot = @() }
$security = @{ tpm = $false; shielded = $false }
if ($vm.Generation -eq 2) {
    $uefi = Get-VMFirmware -VM $vm
    $drives = @($uefi.BootOrder | Where-Object -FilterScript { $_.Device -and $_.Device.ControllerType } | ForEach-Object -Process {
            @{ bus = [int]$_.Device.ControllerType; controller = $_.Device.ControllerNumber; location = $_.Device.ControllerLocation }
        })
    $firmware = @{ secure_boot = ([string]$uefi.SecureBoot -eq 'On'); template = [string]$uefi.SecureBootTemplate; boot = $drives }
    $vmsecurity = Get-VMSecurity -VM $vm
    $security = @{ tpm = [bool]$vmsecurity.TpmEnabled; shielded = [bool]$vmsecurity.Shielded }
}
$nics = @(Get-VMNetworkAdapter -VM $vm | ForEach-Object -Process {
        $vlan = Get-VMNetworkAdapterVlan -VMNetworkAdapter $_
        @{
            id = $_.Id; mac = $_.MacAddress; legacy = $_.IsLegacy; connected = $_.Connected; switch = $_.SwitchName
            addresses = @($_.IPAddresses); vlan_mode = [int]$vlan.OperationMode; vlan = $vlan.AccessVlanId
        }
    })
$services = @(Get-VMIntegrationService -VM $vm | ForEach-Object -Process {
        @{ id = $_.Id; name = $_.Name; enabled = $_.Enabled; status = [int]$_.PrimaryOperationalStatus }
    })
$checkpoints = @(Get-VMSnapshot -VM $vm -SnapshotType Standard | ForEach-Object -Process {
        @{ id = $_.Id.ToString(); name = $_.Name; created = $_.CreationTime.ToUniversalTime().ToString('o') }
    })
# Windows Server 2012 R2 has neither, 2016 no parts of GPUs.
$pci = @()
if (Get-Command -Name Get-VMAssignableDevice -ErrorAction SilentlyContinue) { $pci = @(Get-VMAssignableDevice -VM $vm) }
$gpus = @()
if (Get-Command -Name Get-VMGpuPartitionAdapter -ErrorAction SilentlyContinue) { $gpus = @(Get-VMGpuPartitionAdapter -VM $vm) }
$kvp = Get-CimAssociatedInstance -InputObject $system -ResultClassName Msvm_KvpExchangeComponent | Select-Object -First 1
ConvertTo-SynVirtAnswer -Value @{
    id = $vm.Id.ToString(); bios_guid = [string]$realized.BIOSGUID; bios_serial = [string]$realized.BIOSSerialNumber
    name = $vm.Name; host = $vm.ComputerName; state = [int]$vm.State; generation = $vm.Generation
    version = $vm.Version; clustered = $vm.IsClustered; checkpoint_type = [int]$vm.CheckpointType
    replication = [int]$vm.ReplicationState; notes = [string]$vm.Notes; status = [string]$vm.SecondaryOperationalStatus
    cpus = $processor.Count; cpus_per_socket = ($processor.MaximumCountPerNumaNode * $processor.MaximumCountPerNumaSocket)
    memory = $memory.Startup; memory_dynamic = $memory.DynamicMemoryEnabled; memory_least = $memory.Minimum; memory_most = $memory.Maximum
    firmware = $firmware; security = $security; nics = $nics; services = $services; checkpoints = $checkpoints
    kvp = @($kvp.GuestIntrinsicExchangeItems)
    dvds = @(Get-VMDvdDrive -VM $vm | Where-Object -Property Path | ForEach-Object -Process { [string]$_.Path })
    floppies = @($vm.FloppyDrive | Where-Object -Property Path | ForEach-Object -Process { [string]$_.Path })
    pci = $pci.Count; gpus = $gpus.Count
    fibre_channel = @($vm.FibreChannelHostBusAdapters).Count
    ports = @(@($vm.ComPort1, $vm.ComPort2) | Where-Object -Property Path | ForEach-Object -Process { [string]$_.Name })
    drives = @(Get-SynVirtDrive -Drives (Get-VMHardDiskDrive -VM $vm))
}
