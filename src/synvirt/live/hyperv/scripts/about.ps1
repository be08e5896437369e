# Who answers: the host, its Hyper-V, what our user may do, and in a cluster its nodes.
param()

$vmhost = Get-VMHost
$windows = Get-CimInstance -ClassName Win32_OperatingSystem
$computer = Get-CimInstance -ClassName Win32_ComputerSystem
$identity = [System.Security.Principal.WindowsIdentity]::GetCurrent()
$principal = New-Object -TypeName System.Security.Principal.WindowsPrincipal -ArgumentList $identity
$nodes = @()
if (Get-Command -Name Get-ClusterNode -ErrorAction SilentlyContinue) {
    try {
        $nodes = @(Get-ClusterNode | ForEach-Object -Process { @{ name = $_.Name; up = ('Up', 'Paused' -contains [string]$_.State) } })
    }
    catch {
        $nodes = @()
    }
}
ConvertTo-SynVirtAnswer -Value @{
    name = $vmhost.Name; product = $windows.Caption; version = $windows.Version
    vm_versions = @($vmhost.SupportedVmVersions); domain = $computer.Domain; in_domain = $computer.PartOfDomain
    user = $identity.Name; nodes = $nodes
    administrator = $principal.IsInRole([System.Security.Principal.WindowsBuiltInRole]::Administrator)
    hyperv_administrator = $principal.IsInRole([System.Security.Principal.SecurityIdentifier]'S-1-5-32-578')
}
