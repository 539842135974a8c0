#ifndef WEFT_TESTS_PIPELINE_REFUSED_PLANS_H_
#define WEFT_TESTS_PIPELINE_REFUSED_PLANS_H_

// Bug reports, as plans that have no proof. Computing stands between sends and receives only where it
// matters.

namespace weft::testing {

// pytorch#172668, before.
inline constexpr char kSendsThatMeetNobody[] =
    "weft-plan 1\nschedule pytorch-172668\nmicro_batches 2\nplacement 0 1 0 1\n"
    "edges 0>1 1>2 2>3\n"
    "worker 0: F0.0 SF0>1.0 F0.1 SF0>1.1 RF1>2.0 F2.0\n"
    "worker 1: RF0>1.0 F1.0 SF1>2.0 RF0>1.1 F1.1\n";

// pytorch#172668, after.
inline constexpr char kSwappedReceives[] =
    "weft-plan 1\nschedule pytorch-172668-swapped\nmicro_batches 3\nplacement 0 1 0 1\n"
    "edges 0>1 1>2 2>3\n"
    "worker 0: SF2>3.1 F0.2 SF0>1.2 RB3>2.0 B2.0 RB3>2.1\n"
    "worker 1: RF2>3.1 SB3>2.0 F3.1 B3.1 RF0>1.2 SB3>2.1 F1.2\n";

// Megatron-LM#5100. For the shapes: to the previous, from the previous, to the next, from the next.
inline constexpr char kEveryWorkerSendsFirst[] =
    "weft-plan 1\nschedule megatron-5100\nmicro_batches 1\nplacement 0 1 2 3\n"
    "edges 0>1 1>2 2>3\n"
    "worker 0: SF0>1.0 RB1>0.0\n"
    "worker 1: SB1>0.0 RF0>1.0 SF1>2.0 RB2>1.0\n"
    "worker 2: SB2>1.0 RF1>2.0 SF2>3.0 RB3>2.0\n"
    "worker 3: SB3>2.0 RF2>3.0\n";

// ray-project/ray#60954.
inline constexpr char kASendBehindWhatWaitsForIt[] =
    "weft-plan 1\nschedule ray-60954\nmicro_batches 1\nplacement 0 1\nedges 0>1\n"
    "worker 0: F0.0 RB1>0.0 B0.0 SF0>1.0 U0\n"
    "worker 1: RF0>1.0 F1.0 B1.0 SB1>0.0 U1\n";

}  // namespace weft::testing

#endif  // WEFT_TESTS_PIPELINE_REFUSED_PLANS_H_
