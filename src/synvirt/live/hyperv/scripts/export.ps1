# Hyper-V writes the disks of a recovery snapshot to a folder: whole, or what changed since a reference point. Begun, not waited for.
param([guid]$VmId, [guid]$SnapshotId, [string]$PointId, [string]$Folder)

$system = Get-SynVirtSystem -VmId $VmId
$snapshot = Get-SynVirtRecoverySnapshot -System $system | Where-Object -Property ConfigurationID -EQ -Value $SnapshotId.ToString()
if ($null -eq $snapshot) { Stop-SynVirt -Call 'Msvm_VirtualSystemSettingData' -Code 404 -Text "there is no recovery snapshot $SnapshotId" }
# CopySnapshotConfiguration 3: one snapshot, for a backup. BackupIntent 1: what is written will be put together by who reads it.
$wishes = @{
    CopySnapshotConfiguration = [byte]3; SnapshotVirtualSystem = (ConvertTo-SynVirtPath -Instance $snapshot); BackupIntent = [byte]1
    CopyVmStorage = $true; CopyVmRuntimeInformation = $false; CreateVmExportSubdirectory = $false
}
if ($PointId) {
    $point = Get-SynVirtReferencePoint -System $system | Where-Object -Property InstanceID -EQ -Value $PointId
    if ($null -eq $point) { Stop-SynVirt -Call 'Msvm_VirtualSystemReferencePoint' -Code 404 -Text "there is no reference point $PointId" }
    $wishes.DifferentialBackupBase = ConvertTo-SynVirtPath -Instance $point
}
$class = Get-CimClass -Namespace $SynVirtNamespace -ClassName Msvm_VirtualSystemExportSettingData
$settings = New-CimInstance -CimClass $class -ClientOnly -Property $wishes
$service = Get-SynVirtService -Class Msvm_VirtualSystemManagementService
$answer = Invoke-CimMethod -InputObject $service -MethodName ExportSystemDefinition -Arguments @{
    ComputerSystem = $system; ExportDirectory = $Folder; ExportSettingData = (ConvertTo-SynVirtText -Instance $settings)
}
$job = ''
if ($answer.ReturnValue -eq 4096) { $job = [string]$answer.Job.InstanceID }
elseif ($answer.ReturnValue -ne 0) { Stop-SynVirt -Call 'ExportSystemDefinition' -Code $answer.ReturnValue -Text '' }
ConvertTo-SynVirtAnswer -Value @{ job = $job }
