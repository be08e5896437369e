# A recovery snapshot becomes a reference point: its disks are merged, its RCT ids stay.
param([guid]$VmId, [guid]$SnapshotId)

$system = Get-SynVirtSystem -VmId $VmId
$snapshot = Get-SynVirtRecoverySnapshot -System $system | Where-Object -Property ConfigurationID -EQ -Value $SnapshotId.ToString()
if ($null -eq $snapshot) { Stop-SynVirt -Call 'Msvm_VirtualSystemSettingData' -Code 404 -Text "there is no recovery snapshot $SnapshotId" }
$before = @(Get-SynVirtReferencePoint -System $system | ForEach-Object -Process { $_.InstanceID })
$service = Get-SynVirtService -Class Msvm_VirtualSystemSnapshotService
$answer = Invoke-CimMethod -InputObject $service -MethodName ConvertToReferencePoint -Arguments @{
    AffectedSnapshot = $snapshot; ReferencePointSettings = ''
}
Wait-SynVirtJob -Call 'ConvertToReferencePoint' -Answer $answer
$new = @(Get-SynVirtReferencePoint -System $system | Where-Object -FilterScript { $before -notcontains $_.InstanceID } |
        ForEach-Object -Process { $_.InstanceID })
ConvertTo-SynVirtAnswer -Value @{ points = $new }
