# How far a job of Hyper-V's is. States: 7 is completed, those above it are failures; 0 is a job that Hyper-V has forgotten.
param([string]$JobId)

$job = Get-CimInstance -Namespace $SynVirtNamespace -ClassName Msvm_ConcreteJob | Where-Object -Property InstanceID -EQ -Value $JobId
if ($null -eq $job) {
    ConvertTo-SynVirtAnswer -Value @{ state = 0; percent = 0; code = 0; text = '' }
}
else {
    ConvertTo-SynVirtAnswer -Value @{
        state = [int]$job.JobState; percent = [int]$job.PercentComplete; code = [int]$job.ErrorCode; text = [string]$job.ErrorDescription
    }
}
