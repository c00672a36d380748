"""What each variable may hold, and what a bad value is told."""

import pytest

from warmstart.settings import PREFIX, Settings, SettingsError, public_fields


def read(**environment: str) -> Settings:
    return Settings.from_environment({f"{PREFIX}{name}": value for name, value in environment.items()})


def test_an_empty_environment_gives_the_defaults():
    settings = read()
    assert settings.model == "weights"
    assert settings.cache_url == "cache"
    assert settings.unplanned == "eager"


def test_every_setting_can_be_set():
    texts = {"self_check": "off", "restore_deadline_s": "1.5", "max_bundle_bytes": "7", "regions": " A , B,"}
    settings = read(**{name.upper(): text for name, text in texts.items()})
    assert settings.self_check is False
    assert settings.restore_deadline_s == 1.5
    assert settings.max_bundle_bytes == 7
    assert settings.regions == ("A", "B")


def test_an_empty_value_is_an_unset_one():
    assert read(DTYPE="", RESTORE_DEADLINE_S=" ") == read()


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("DTYPE", "fp32", "auto, float32, bfloat16, float16"),
        ("COMPILE", "yes", "auto, required, off"),
        ("FULLGRAPH", "maybe", "true or false"),
        ("RESTORE_DEADLINE_S", "-1", "a number of at least 0"),
        ("RESTORE_DEADLINE_S", "nan", "a number of at least 0"),
        ("RESTORE_DEADLINE_S", "inf", "a number of at least 0"),
        ("RESTORE_DEADLINE_S", "1e10", "at most 1e+09"),
        ("RESTORE_DEADLINE_S", "5s", "a number of at least 0"),
        ("MAX_BUNDLE_BYTES", "1.5", "a whole number of at least 1"),
        ("MAX_BUNDLE_BYTES", "0", "a whole number of at least 1"),
        (
            "STRATEGY",
            "hierarchical",
            "regional, whole. Correct or unset it. Torch 2.13's nested_compile_region",
        ),
        ("QUANTIZE", "int4", "none, int8, fp8"),
        ("LORA_RANK", "-1", "a whole number of at least 0"),
        ("LORA_RANK", "2000", "0 to 1024"),
        ("DEVICE", "gpu", "auto, cpu, cuda or cuda:N"),
        ("DEVICE", "cuda:x", "auto, cpu, cuda or cuda:N"),
    ],
)
def test_a_bad_value_is_one_error_with_variable_value_and_what_is_allowed(name, value, allowed):
    with pytest.raises(SettingsError) as error:
        read(**{name: value})
    for part in (f"WARMSTART_{name}", repr(value), allowed):
        assert part in str(error.value)


def test_a_model_that_is_not_there_is_an_error():
    with pytest.raises(SettingsError, match="WARMSTART_MODEL is 'wieghts', which is no directory"):
        read(MODEL="wieghts").check_model()


def test_layers_for_loras_without_room_for_any_are_an_error_that_names_both():
    assert read(LORA_TARGETS="to_q,to_k", LORA_RANK="4").lora_targets == ("to_q", "to_k")
    with pytest.raises(
        SettingsError, match=r"LORA_TARGETS is 'to_q,to_k', but WARMSTART_LORA_RANK is 0.*no effect; set"
    ):
        read(LORA_TARGETS="to_q,to_k")


def test_a_misspelt_setting_is_an_error_that_names_the_right_one():
    with pytest.raises(SettingsError, match=r"WARMSTART_CASHE_URL is set.*did you mean WARMSTART_CACHE_URL"):
        read(CASHE_URL="s3://bucket")


def test_the_prefix_of_tests_is_free():
    assert read(TEST_MODEL="anything") == read()


@pytest.mark.parametrize(("text", "threads"), [("3", 3), ("4,2", 4)])
def test_threads_are_those_of_openmp(text, threads):
    assert Settings.from_environment({"OMP_NUM_THREADS": text}).threads == threads


@pytest.mark.parametrize("text", ["", "0", "many", "99999999999999999999"])
def test_threads_without_openmps_word_are_the_cores_of_this_process(text):
    assert Settings.from_environment({"OMP_NUM_THREADS": text}).threads == Settings.from_environment({}).threads >= 1


def test_torchs_variables_that_change_code_are_kept_and_those_that_say_where_are_not():
    settings = Settings.from_environment(
        {"TORCHINDUCTOR_MAX_AUTOTUNE": "1", "TORCHINDUCTOR_CACHE_DIR": "/a", "TRITON_CACHE_DIR": "/b", "PATH": "/c"}
    )
    assert settings.torch_options == (("TORCHINDUCTOR_MAX_AUTOTUNE", "1"),)
    assert settings.torch_cache_dir == "/a"


def test_each_setting_has_a_sentence():
    assert all(field.metadata["doc"].endswith(".") for field in public_fields())
