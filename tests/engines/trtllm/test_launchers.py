import pytest

from bireme.engines.trtllm.launchers import drop_launchers

SRUN = {"PMIX_RANK": "0", "PMI_FD": "3", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
MPIRUN = {
    "OMPI_COMM_WORLD_SIZE": "1",
    "OMPI_UNIVERSE_SIZE": "1",
    "OMPI_MCA_orte_hnp_uri": "a",
    "OMPI_MCA_ess_base_jobid": "1",
    "PRTE_LAUNCHED": "1",
    "PMIX_NAMESPACE": "a",
}
OWN = {
    "PATH": "/bin",
    "UCX_TLS": "tcp",
    "TLLM_LOG_LEVEL": "INFO",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_MCA_btl": "^openib",
    "PMIX_MCA_gds": "hash",
}


@pytest.mark.parametrize("launcher", [SRUN, MPIRUN, {}])
def test_an_engine_below_srun_or_mpirun_starts_its_ranks_as_without(launcher, caplog):
    environment = OWN | launcher
    with caplog.at_level("INFO"):
        drop_launchers(environment)
    assert environment == OWN and all(name in caplog.text for name in launcher)


def test_below_tensorrt_llm_s_own_launcher_all_stays():
    environment = OWN | SRUN | {"TLLM_SPAWN_PROXY_PROCESS": "1"}
    before = dict(environment)
    drop_launchers(environment)
    assert environment == before
