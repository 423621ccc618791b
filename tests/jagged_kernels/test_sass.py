"""What the check of machine code finds, in listings written by hand."""

import pytest

pytest.importorskip("triton")

from .sass import find_unwritten

LISTING = """
.text.kernel:
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/                   ULDC.64 UR6, c[0x0][0x208] ;
        /*0020*/                   LDG.E R2, desc[UR6][R4.64] ;
        /*0030*/                   ISETP.NE.AND P0, PT, R2, UR7, PT ;
        /*0040*/              @!P0 BRA `(.L_x_1) ;
        /*0050*/                   R2UR UR8, R3 ;
        /*0060*/                   UMOV UR9, 0x40000040 ;
        /*0070*/                   UIADD3 UR10, UP0, UR8, 0x80, URZ ;
        /*0080*/                   ULOP3.LUT UP1, UR11, UR9, 0x1, URZ, 0xc0, !UPT ;
        /*0090*/                   HGMMA.64x128x16.F32 R24, gdesc[UR8].tnspB, RZ, !UPT, gsb0 ;
.L_x_1:
{between}
        /*00b0*/              @!P0 HGMMA.64x128x16.F32 R24, R88, gdesc[UR8].tnspB, R24, gsb0 ;
        /*00c0*/                   EXIT ;
"""
INDEXED = """
        /*0000*/                   BRX R2 -0x10                     (*"BRANCH_TARGETS .L_x_2,.L_x_3"*);
.L_x_2:
        /*0010*/                   S2UR UR4, SR_CTAID.X ;
        /*0020*/                   BRA `(.L_x_4) ;
.L_x_3:
        /*0030*/                   {write}
.L_x_4:
        /*0040*/                   IADD3 R0, R0, UR4, RZ ;
        /*0050*/                   EXIT ;
        /*0060*/                   IADD3 R0, R0, UR5, RZ ;
"""  # noqa: E501
CALLING = """
        /*0000*/                   CALL.REL.NOINC `($__internal_0_$__div_s64) ;
        /*0010*/                   IMAD.U32 R2, RZ, RZ, UR6 ;
        /*0020*/                   IMAD.U32 R2, RZ, RZ, UR7 ;
        /*0030*/                   EXIT ;
$__internal_0_$__div_s64:
        /*0040*/                   USEL UR6, UR7, UR6, !UP1 ;
        /*0050*/                   RET.REL.NODEC R4 `(kernel) ;
        /*0060*/                   UMOV UR7, 0x1 ;
"""


def test_registers_of_a_branch_that_may_not_have_run():
    assert [x.split(":")[0] for x in find_unwritten(LISTING.format(between=""))] == ["UR10", "UR11"]
    assert find_unwritten(LISTING.format(between="        /*00a0*/  ULDC UR10, c[0x0][0x210] ;"))[
        0
    ].startswith("UR11: @!P0 HGMMA")


@pytest.mark.parametrize(
    "write",
    [
        "        /*00a0*/   ULDC.64 UR10, c[0x0][0x210] ;",
        "        /*00a0*/   @!P0 UIMAD.WIDE UR10, UR6, UR7, URZ ;",
    ],
)
def test_registers_written_on_every_path(write):
    assert find_unwritten(LISTING.format(between=write)) == []


def test_targets_of_an_indexed_branch():
    """And nothing is said of what no path leads to."""
    assert find_unwritten(INDEXED.format(write="NOP ;")) == ["UR4: IADD3 R0, R0, UR4, RZ"]
    assert find_unwritten(INDEXED.format(write="@P0 UMOV UR4, 0x1 ;")) == []


def test_a_function_writes_its_results():
    assert find_unwritten(CALLING) == ["UR7: IMAD.U32 R2, RZ, RZ, UR7"]


@pytest.mark.parametrize("selector, leaves_the_upper_half", [("0x7632", True), ("0x7610", False)])
def test_half_of_a_register_may_be_written(selector, leaves_the_upper_half):
    write = f"UPRMT UR4, URZ, {selector}, UR4"
    assert find_unwritten(INDEXED.format(write=f"{write} ;")) == (
        [] if leaves_the_upper_half else [f"UR4: {write}"]
    )


def test_a_register_may_be_saved_before_it_holds_anything():
    assert (
        find_unwritten(
            INDEXED.format(write="NOP ;").replace("IADD3 R0, R0, UR4, RZ", "MOV R0, UR4")
        )
        == []
    )
