# The VM's notes, whole.
param([guid]$VmId, [string]$Notes)

Set-VM -VM (Get-SynVirtVM -VmId $VmId) -Notes $Notes
ConvertTo-SynVirtAnswer -Value @{ written = $true }
