# A recovery snapshot: Level 1 asks the guest to be quiet, 2 is as after a power failure.
param([guid]$VmId, [ValidateSet(1, 2)][int]$Level)

$system = Get-SynVirtSystem -VmId $VmId
$service = Get-SynVirtService -Class Msvm_VirtualSystemSnapshotService
$class = Get-CimClass -Namespace $SynVirtNamespace -ClassName Msvm_VirtualSystemSnapshotSettingData
$settings = New-CimInstance -CimClass $class -ClientOnly -Property @{
    ConsistencyLevel = [byte]$Level; IgnoreNonSnapshottableDisks = $true
}
$answer = Invoke-CimMethod -InputObject $service -MethodName CreateSnapshot -Arguments @{
    AffectedSystem = $system; SnapshotSettings = (ConvertTo-SynVirtText -Instance $settings); SnapshotType = [uint16]32768
}
Wait-SynVirtJob -Call 'CreateSnapshot' -Answer $answer
ConvertTo-SynVirtAnswer -Value @{ taken = $true }
