# SPDX-License-Identifier: Apache-2.0
"""What is read of processors' reports."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes.attestation.reports import Claims, claims_of
from infranetes.providers.confidential import Confidential
from infranetes_common.errors import FailedPrecondition
from tests.infranetes.attestation.made_reports import MEASUREMENT, snp_report, tdx_quote

BOUND = bytes(range(100, 164))
SNP, TDX = Confidential.SEV_SNP, Confidential.TDX


class ReportTests(SynchronousTestCase):
    def test_what_a_report_says(self) -> None:
        expected = Claims(MEASUREMENT.hex(), BOUND, debug=False)
        self.assertEqual(claims_of(SNP, snp_report(BOUND)), expected)
        for version in (4, 5):
            self.assertEqual(claims_of(TDX, tdx_quote(BOUND, version=version)), expected)

    def test_a_vm_whose_memory_its_hypervisor_may_read(self) -> None:
        self.assertTrue(claims_of(SNP, snp_report(BOUND, policy=0x30000 | 1 << 19)).debug)
        self.assertTrue(claims_of(TDX, tdx_quote(BOUND, attributes=1)).debug)
        self.assertFalse(claims_of(TDX, tdx_quote(BOUND, attributes=1 << 28)).debug)

    def test_what_is_none(self) -> None:
        for technology, report in (
            (SNP, b""),
            (SNP, snp_report(BOUND)[:-1]),
            (SNP, snp_report(BOUND, version=1)),
            (TDX, snp_report(BOUND)),
            (TDX, tdx_quote(BOUND, version=3)),
            (TDX, tdx_quote(BOUND, kind=0)),
            (TDX, tdx_quote(BOUND)[:631]),
            (TDX, tdx_quote(BOUND, version=5)[:637]),
        ):
            error = self.assertRaises(FailedPrecondition, claims_of, technology, report)
            self.assertIn(f"none of {technology.value}", str(error))

    @given(st.sampled_from(Confidential), st.binary(max_size=2048))
    def test_whatever_a_vm_sends_is_refused_or_read(self, technology: Confidential, report: bytes) -> None:
        try:
            claims = claims_of(technology, report)
        except FailedPrecondition:
            return
        self.assertEqual((len(claims.measurement), len(claims.bound)), (96, 64))
