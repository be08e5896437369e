# Wish: start, shutdown (asks the guest), off (as if its plug were pulled).
param([guid]$VmId, [ValidateSet('start', 'shutdown', 'off')][string]$Wish)

$vm = Get-SynVirtVM -VmId $VmId
$heard = $true
if ($Wish -eq 'start') {
    Start-VM -VM $vm
}
elseif ($Wish -eq 'off') {
    Stop-VM -VM $vm -TurnOff -Force
}
else {
    $system = Get-SynVirtSystem -VmId $VmId
    $guest = Get-CimAssociatedInstance -InputObject $system -ResultClassName Msvm_ShutdownComponent | Select-Object -First 1
    $heard = $false
    if ($guest) {
        $answer = Invoke-CimMethod -InputObject $guest -MethodName InitiateShutdown -Arguments @{ Force = $true; Reason = 'SynVirt moves this VM' }
        $heard = ($answer.ReturnValue -eq 0 -or $answer.ReturnValue -eq 4096)
    }
}
ConvertTo-SynVirtAnswer -Value @{ heard = $heard }
