# What a pass needs to know of a VM: power, notes, disks, recovery snapshots with theirs, reference points.
param([guid]$VmId)

$vm = Get-SynVirtVM -VmId $VmId
$system = Get-SynVirtSystem -VmId $VmId
$recovery = @(Get-SynVirtRecoverySnapshot -System $system)
$ids = @($recovery | ForEach-Object -Process { $_.ConfigurationID })
$snapshots = @(Get-VMSnapshot -VM $vm -SnapshotType Recovery | Where-Object -FilterScript { $ids -contains $_.Id.ToString() } |
        ForEach-Object -Process {
            @{ id = $_.Id.ToString(); notes = [string]$_.Notes; drives = @(Get-SynVirtDrive -Drives (Get-VMHardDiskDrive -VMSnapshot $_)) }
        })
$points = @(Get-SynVirtReferencePoint -System $system | ForEach-Object -Process {
        @{
            id = $_.InstanceID; type = $_.ReferencePointType; level = $_.ConsistencyLevel
            disks = @($_.VirtualDiskIdentifiers); trackings = @($_.ResilientChangeTrackingIdentifiers)
        }
    })
$changed = ''
if ($system.TimeOfLastStateChange) { $changed = $system.TimeOfLastStateChange.ToUniversalTime().ToString('o') }
ConvertTo-SynVirtAnswer -Value @{
    state = [int]$vm.State; status = [string]$vm.SecondaryOperationalStatus; version = $vm.Version; changed = $changed
    checkpoint_type = [int]$vm.CheckpointType; notes = [string]$vm.Notes
    drives = @(Get-SynVirtDrive -Drives (Get-VMHardDiskDrive -VM $vm)); snapshots = $snapshots; points = $points
}
