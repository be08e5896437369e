# A recovery snapshot or a reference point goes; nothing to do where it is no more.
param([guid]$VmId, [string]$SnapshotId, [string]$PointId)

$system = Get-SynVirtSystem -VmId $VmId
if ($SnapshotId) {
    $snapshot = Get-SynVirtRecoverySnapshot -System $system | Where-Object -Property ConfigurationID -EQ -Value $SnapshotId
    if ($snapshot) {
        $service = Get-SynVirtService -Class Msvm_VirtualSystemSnapshotService
        $answer = Invoke-CimMethod -InputObject $service -MethodName DestroySnapshot -Arguments @{ AffectedSnapshot = $snapshot }
        Wait-SynVirtJob -Call 'DestroySnapshot' -Answer $answer
    }
}
if ($PointId) {
    $point = Get-SynVirtReferencePoint -System $system | Where-Object -Property InstanceID -EQ -Value $PointId
    if ($point) {
        $service = Get-SynVirtService -Class Msvm_VirtualSystemReferencePointService
        $answer = Invoke-CimMethod -InputObject $service -MethodName DestroyReferencePoint -Arguments @{ AffectedReferencePoint = $point }
        Wait-SynVirtJob -Call 'DestroyReferencePoint' -Answer $answer
    }
}
ConvertTo-SynVirtAnswer -Value @{ destroyed = $true }
