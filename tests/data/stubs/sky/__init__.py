"""Stands for SkyPilot's client: sky.Resources with the names of its arguments, and a ValueError as it raises."""


class Resources:
    def __init__(
        self,
        cloud=None,
        instance_type=None,
        cpus=None,
        memory=None,
        accelerators=None,
        accelerator_args=None,
        infra=None,
        use_spot=None,
        job_recovery=None,
        region=None,
        zone=None,
        image_id=None,
        disk_size=None,
        disk_tier=None,
        network_tier=None,
        ports=None,
        labels=None,
        autostop=None,
        priority=None,
        volumes=None,
        _docker_login_config=None,
    ):
        if infra not in (None, "aws", "gcp", "k8s"):
            raise ValueError(f"Cloud {infra!r} is not a valid cloud among ['aws', 'gcp', 'kubernetes']")
        if str(accelerators or "").startswith("H9000"):
            raise ValueError(f"Invalid accelerator {accelerators!r}")
