"""The platforms of replicas: one protocol (base), the life of a process (executor, platform), a module or folder each.

A new platform has one line in EXECUTORS, and one more in FAR if its machines see nothing of this one.
"""

EXECUTORS = {
    "local": "executors.platforms.on_host.executor:LocalProcessExecutor",
    "modal": "executors.platforms.on_modal.executor:ModalExecutor",
    "hf-jobs": "executors.platforms.on_hf_jobs.executor:HFJobsExecutor",
    "slurm": "executors.platforms.on_slurm.executor:SlurmExecutor",
    "sky": "executors.platforms.on_sky:SkyExecutor",
}
FAR = ("modal", "hf-jobs", "sky")
