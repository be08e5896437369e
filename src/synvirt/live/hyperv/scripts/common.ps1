# What every script of this folder needs. Run once in each runspace, before any other.
# Answers are one line of JSON; a failure of Hyper-V's is thrown as «SYNVIRT » and JSON: what was called, code, text.

$ErrorActionPreference = 'Stop'
$ProgressPreference = 'SilentlyContinue'
$SynVirtNamespace = 'root\virtualization\v2'

function ConvertTo-SynVirtAnswer {
    param($Value)
    ConvertTo-Json -InputObject $Value -Depth 8 -Compress
}

function Stop-SynVirt {
    param([string]$Call, [int64]$Code, [string]$Text)
    $answer = ConvertTo-SynVirtAnswer -Value @{ call = $Call; code = $Code; text = $Text }
    throw "SYNVIRT $answer"
}

function Get-SynVirtService {
    param([string]$Class)
    Get-CimInstance -Namespace $SynVirtNamespace -ClassName $Class | Select-Object -First 1
}

# The VM as Hyper-V's cmdlets have it. The id is a GUID by its type, never text.
function Get-SynVirtVM {
    param([guid]$VmId)
    $found = Get-VM | Where-Object -Property Id -EQ -Value $VmId
    if ($null -eq $found) { Stop-SynVirt -Call 'Get-VM' -Code 404 -Text "there is no VM $VmId" }
    $found
}

# The VM as WMI has it.
function Get-SynVirtSystem {
    param([guid]$VmId)
    $name = $VmId.ToString().ToUpperInvariant()
    $found = Get-CimInstance -Namespace $SynVirtNamespace -ClassName Msvm_ComputerSystem -Filter "Name='$name'"
    if ($null -eq $found) { Stop-SynVirt -Call 'Msvm_ComputerSystem' -Code 404 -Text "there is no VM $VmId" }
    $found
}

# A method's answer, once it is there: 0 is done, 4096 is a job that is waited for.
function Wait-SynVirtJob {
    param([string]$Call, $Answer)
    if ($Answer.ReturnValue -eq 0) { return }
    if ($Answer.ReturnValue -ne 4096) { Stop-SynVirt -Call $Call -Code $Answer.ReturnValue -Text '' }
    $job = Get-CimInstance -InputObject $Answer.Job
    # 2 new, 3 starting, 4 running, 5 suspended, 6 shutting down; 7 is completed, all others are failures.
    while ($job.JobState -lt 7) {
        Start-Sleep -Milliseconds 500
        $job = Get-CimInstance -InputObject $job
    }
    if ($job.JobState -ne 7) { Stop-SynVirt -Call $Call -Code $job.ErrorCode -Text $job.ErrorDescription }
}

# An instance as text, which is how WMI's methods take settings.
function ConvertTo-SynVirtText {
    param($Instance)
    $serializer = [Microsoft.Management.Infrastructure.Serialization.CimSerializer]::Create()
    $bytes = $serializer.Serialize($Instance, [Microsoft.Management.Infrastructure.Serialization.InstanceSerializationOptions]::None)
    [System.Text.Encoding]::Unicode.GetString($bytes)
}

# Where WMI finds an instance again, as one object names another.
function ConvertTo-SynVirtPath {
    param($Instance)
    $name = $Instance.CimClass.CimClassName
    $id = $Instance.InstanceID.Replace('\', '\\').Replace('"', '\"')
    '\\{0}\{1}:{2}.InstanceID="{3}"' -f $env:COMPUTERNAME, $SynVirtNamespace, $name, $id
}

# Hyper-V's own snapshots for backups, found by their type.
function Get-SynVirtRecoverySnapshot {
    param($System)
    Get-CimAssociatedInstance -InputObject $System -Association Msvm_SnapshotOfVirtualSystem -ResultClassName Msvm_VirtualSystemSettingData |
        Where-Object -Property VirtualSystemType -EQ -Value 'Microsoft:Hyper-V:Snapshot:Recovery'
}

function Get-SynVirtReferencePoint {
    param($System)
    Get-CimAssociatedInstance -InputObject $System -Association Msvm_ReferencePointOfVirtualSystem -ResultClassName Msvm_VirtualSystemReferencePoint
}

# A disk file and those that it lies over. What cannot be inspected says why.
function Get-SynVirtChain {
    param([string]$Path)
    $next = $Path
    for ($depth = 0; $next -and $depth -lt 64; $depth++) {
        try {
            $file = Get-VHD -Path $next
        }
        catch {
            @{ path = $next; error = $_.Exception.Message }
            return
        }
        @{
            path = $file.Path; format = [int]$file.VhdFormat; type = [int]$file.VhdType; size = $file.Size
            file_size = $file.FileSize; parent = $file.ParentPath; id = $file.DiskIdentifier
            sector = $file.LogicalSectorSize
        }
        $next = $file.ParentPath
    }
}

function Get-SynVirtDrive {
    param($Drives)
    foreach ($drive in $Drives) {
        $physical = $null -ne $drive.DiskNumber
        $chain = @()
        if ($drive.Path -and -not $physical) { $chain = @(Get-SynVirtChain -Path $drive.Path) }
        @{
            bus = [int]$drive.ControllerType; controller = $drive.ControllerNumber; location = $drive.ControllerLocation
            path = $drive.Path; physical = $physical; shared = [bool]$drive.SupportPersistentReservations; chain = $chain
        }
    }
}
