# What changed in a part of a disk since an RCT id; Hyper-V may look at less than it is asked for.
param([string]$Path, [string]$LimitId, [uint64]$Offset, [uint64]$Length)

$service = Get-SynVirtService -Class Msvm_ImageManagementService
$answer = Invoke-CimMethod -InputObject $service -MethodName GetVirtualDiskChanges -Arguments @{
    Path = $Path; LimitId = $LimitId; TargetSnapshotId = ''; ByteOffset = $Offset; ByteLength = $Length
}
Wait-SynVirtJob -Call 'GetVirtualDiskChanges' -Answer $answer
ConvertTo-SynVirtAnswer -Value @{
    processed = $answer.ProcessedByteLength; offsets = @($answer.ChangedByteOffsets); lengths = @($answer.ChangedByteLengths)
}
