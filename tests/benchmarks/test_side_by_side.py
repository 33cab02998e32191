"""What the comparison says about the machine."""

from benchmarks.side_by_side import processor


def test_the_features_of_a_processor_are_named() -> None:
    intel = "processor : 0\nmodel name : Some Xeon\nflags : fpu avx2 amx_bf16 avx512f\n\n"
    assert processor(intel + intel) == "Some Xeon (amx_bf16, avx512f, avx2)"
    arm = "processor : 0\nFeatures : fp asimd bf16 sve2\n"
    assert processor(arm).endswith(" (bf16, asimd)")


def test_a_processor_without_a_list_has_a_name_all_the_same() -> None:
    assert processor("").endswith(" (none of the features looked for)")
