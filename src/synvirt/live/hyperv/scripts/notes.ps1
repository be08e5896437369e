# The VM's notes, whole. Checked, 1: only where they still are as they were Before; else the answer has those of now.
param([guid]$VmId, [int]$Checked, [string]$Before, [string]$Notes)

$vm = Get-SynVirtVM -VmId $VmId
$present = [string]$vm.Notes
$written = ($Checked -eq 0) -or ($present -ceq $Before)
if ($written) {
    Set-VM -VM $vm -Notes $Notes
}
ConvertTo-SynVirtAnswer -Value @{ written = $written; notes = $present }
