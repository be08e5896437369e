# All VMs of the host, in one answer.
param()

$found = @(Get-VM | ForEach-Object -Process {
        @{ id = $_.Id.ToString(); name = $_.Name; state = [int]$_.State; cpus = $_.ProcessorCount; memory = $_.MemoryStartup }
    })
ConvertTo-SynVirtAnswer -Value @{ vms = $found }
