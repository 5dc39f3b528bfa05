"""The platforms on which replicas run: a protocol (base), a base class (executor, platform), a module per platform.

A new platform needs a line in EXECUTORS, and a line in FAR if the platform's machines cannot see this machine's files.
"""

EXECUTORS = {
    "local": "executors.platforms.on_host.executor:LocalProcessExecutor",
    "modal": "executors.platforms.on_modal.executor:ModalExecutor",
    "hf-jobs": "executors.platforms.on_hf_jobs.executor:HFJobsExecutor",
    "slurm": "executors.platforms.on_slurm.executor:SlurmExecutor",
    "sky": "executors.platforms.on_sky:SkyExecutor",
}
FAR = ("modal", "hf-jobs", "sky")
