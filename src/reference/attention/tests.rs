use super::*;
use crate::{Bias, Mask, Window, alibi_slopes};
use half::bf16;

const NI: f32 = f32::NEG_INFINITY;

fn close(actual: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(actual.len(), expected.len());
    for (a, e) in actual.iter().zip(expected) {
        assert!(a == e || (a - e).abs() <= tolerance, "{actual:?}, expected {expected:?}");
    }
}

fn heads(data: &[f32], shape: [usize; 4]) -> Heads<'_, f32> {
    Heads::bhsd(data, shape).unwrap()
}

/// Attention where all scores are 0 and V counts 1, 2, 3, ...: each output is the mean of what its query sees.
fn ramp(l: usize, s: usize, options: &Options<'_>) -> Attention {
    let (q, v): (Vec<f32>, Vec<f32>) = (vec![0.0; l], (1..=s).map(|x| x as f32).collect());
    multi_head(&heads(&q, [1, 1, l, 1]), &heads(&v, [1, 1, s, 1]), &heads(&v, [1, 1, s, 1]), options).unwrap()
}

/// One query of 1 against keys that are the raw scores, of scale 1.
fn scores(keys: &[f32], values: &[f32], options: Options<'_>) -> Attention {
    let column = |data| Matrix::contiguous(data, [keys.len(), 1]).unwrap();
    let q = Matrix::contiguous(&[1.0f32], [1, 1]).unwrap();
    sdpa(&q, &column(keys), &column(values), &options.softmax_scale(options.softmax_scale.unwrap_or(1.0))).unwrap()
}

#[test]
fn a10_corners_of_causality() {
    let run = |l, s, diagonal| ramp(l, s, &Options::new().causal(diagonal)).out;
    close(&run(2, 5, Diagonal::TopLeft), &[1.0, 1.5], 1e-12);
    close(&run(5, 2, Diagonal::TopLeft), &[1.0, 1.5, 1.5, 1.5, 1.5], 1e-12);
    close(&run(1, 16, Diagonal::TopLeft), &[1.0], 1e-12);
    close(&run(2, 5, Diagonal::BottomRight), &[2.5, 3.0], 1e-12);
    close(&run(5, 2, Diagonal::BottomRight), &[0.0, 0.0, 0.0, 1.0, 1.5], 1e-12);
    close(&run(1, 16, Diagonal::BottomRight), &[8.5], 1e-12);
    close(&run(2, 5, Diagonal::Offset(2)), &[2.0, 2.5], 1e-12);
    close(&run(3, 5, Diagonal::Offset(-1)), &[0.0, 1.0, 1.5], 1e-12);
    close(&run(2, 2, Diagonal::Offset(isize::MIN)), &[0.0, 0.0], 1e-12);
    close(&run(2, 2, Diagonal::Offset(isize::MAX)), &[1.5, 1.5], 1e-12);
}

#[test]
fn a14_windows_count_keys_besides_the_own() {
    let run = |left, right, causal| {
        let window = Window { left, right, diagonal: Diagonal::TopLeft };
        ramp(8, 8, &Options { causal, window: Some(window), ..Options::new() }).out
    };
    let causal = Some(Diagonal::TopLeft);
    close(&run(Some(1), None, causal), &[1.0, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5], 1e-12);
    close(&run(Some(2), Some(5), causal), &[1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 1e-12);
    close(&run(Some(0), Some(0), None), &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], 1e-12);
    close(&run(Some(1), Some(1), None), &[1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 7.5], 1e-12);
    close(&run(Some(usize::MAX), Some(usize::MAX), None), &[4.5; 8], 1e-12);
}

#[test]
fn a36_polarity_of_masks() {
    let upper: Vec<bool> = (0..16).map(|at| at % 4 >= at / 4).collect();
    let view = Matrix::contiguous(&upper, [4, 4]).unwrap();
    let run = |mask: Mask<'_>| ramp(4, 4, &Options::new().mask(mask)).out;
    close(&run(Mask::attend(view).unwrap()), &[2.5, 3.0, 3.5, 4.0], 1e-12);
    close(&run(Mask::ignore(view).unwrap()), &[0.0, 1.0, 1.5, 2.0], 1e-12);
}

#[test]
fn a37_a38_softcap_comes_before_the_mask() {
    let bias = Bias::new(Matrix::contiguous(&[0.0, NI], [1, 2]).unwrap()).unwrap();
    assert_eq!(scores(&[0.0, 0.0], &[1.0, 1000.0], Options::new().softcap(1.0).bias(bias)).out, [1.0]);
    // With one key the LSE is its score.
    let inf = f32::INFINITY;
    for (raw, capped) in
        [(1.0, 0.999867), (100.0, 48.201379), (4400.0, 50.0), (-10000.0, -50.0), (inf, 50.0), (NI, -50.0)]
    {
        close(&scores(&[raw], &[7.0], Options::new().softcap(50.0)).lse, &[capped], 1e-6);
    }
    // The cap applies to the scaled score, and the bias comes on top of it.
    let table = [3.0];
    let bias = Bias::new(Matrix::contiguous(&table, [1, 1]).unwrap()).unwrap();
    let options = Options::new().softmax_scale(0.5).softcap(50.0).bias(bias);
    close(&scores(&[200.0], &[7.0], options).lse, &[51.201379], 1e-6);
}

#[test]
fn a39_any_finite_scale() {
    let run = |scale| scores(&[0.0, 1.0, 2.0], &[10.0, 20.0, 30.0], Options::new().softmax_scale(scale)).out;
    close(&run(-1.0), &[14.247896], 1e-6);
    close(&run(0.0), &[20.0], 1e-12);
    let causal = Options::new().softmax_scale(-1.0).causal(Diagonal::Offset(1));
    close(&scores(&[0.0, 1.0, 2.0], &[10.0, 20.0, 30.0], causal).out, &[12.689414], 1e-6);
}

#[test]
fn a40_default_scale() {
    let (q, k) = ([0.1f32, 0.2, 0.3, 0.4, 0.5, 0.6], [0.7f32, 0.8, 0.9, 1.0, 1.1, 1.2]);
    let v = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0];
    let [q, k, v] = [&q, &k, &v].map(|data| Matrix::contiguous(data, [3, 2]).unwrap());
    let options = Options::new().causal(Diagonal::TopLeft);
    let expected = [1.0, 2.0, 2.049457, 3.049457, 3.206586, 4.206586];
    close(&sdpa(&q, &k, &v, &options).unwrap().out, &expected, 1e-6);
    let expected = [1.0, 2.0, 2.0, 3.0, 3.0, 4.0];
    close(&sdpa(&q, &k, &v, &options.softmax_scale(0.0)).unwrap().out, &expected, 1e-12);
}

#[test]
fn a41_alibi() {
    close(
        &alibi_slopes(6).iter().map(|&x| x.into()).collect::<Vec<f64>>(),
        &[0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125],
        0.0,
    );
    let (twelve, eight) = (alibi_slopes(12), alibi_slopes(8));
    assert_eq!((&twelve[..8], eight[7]), (&eight[..], 0.00390625));
    close(
        &twelve[8..].iter().map(|&x| x.into()).collect::<Vec<f64>>(),
        &[1.0, 2.0, 4.0, 8.0].map(|x| core::f64::consts::FRAC_1_SQRT_2 / x),
        1e-6,
    );
    // Distances 1, 0, 1, with a slope of ln 2: weights 1 : 2 : 1.
    let slopes = [core::f32::consts::LN_2];
    let run = |diagonal| scores(&[0.0; 3], &[1.0, 2.0, 4.0], Options::new().alibi(&slopes, diagonal));
    close(&run(Diagonal::Offset(1)).weights, &[0.25, 0.5, 0.25], 1e-7);
    // The only query stands at the last of three keys: distances 2, 1, 0.
    close(&run(Diagonal::BottomRight).weights, &[1.0 / 7.0, 2.0 / 7.0, 4.0 / 7.0], 1e-7);
    close(&run(Diagonal::TopLeft).weights, &[4.0 / 7.0, 2.0 / 7.0, 1.0 / 7.0], 1e-7);
}

#[test]
fn a42_sinks() {
    let run = |sink, options: Options<'_>| scores(&[0.0, 0.0], &[3.0, 9.0], options.sinks(&[sink]));
    close(&run(0.0, Options::new()).out, &[4.0], 1e-12);
    close(&run(0.0, Options::new()).weights, &[1.0 / 3.0; 2], 1e-12);
    close(&run(0.0, Options::new()).lse, &[3f64.ln()], 1e-12);
    close(&run(200.0, Options::new()).out, &[0.0], 1e-12);
    close(&run(200.0, Options::new()).lse, &[200.0], 1e-12);
    close(&run(NI, Options::new()).out, &[6.0], 1e-12);
    // Neither scaled nor capped.
    close(&run(200.0, Options::new().softcap(0.01).softmax_scale(0.0)).lse, &[200.0], 1e-12);
    let empty = run(1.0, Options::new().key_lengths(&[0]));
    assert_eq!((empty.out[0], empty.lse[0], &empty.weights[..]), (0.0, f64::NEG_INFINITY, &[0.0, 0.0][..]));
}

#[test]
fn a53_large_scores() {
    let keys = [-249.87, -424.13, -460.29, 378.10, -292.61];
    let attention = scores(&keys, &[1.0, 2.0, 3.0, 4.0, 5.0], Options::new());
    close(&attention.weights, &[0.0, 0.0, 0.0, 1.0, 0.0], 1e-12);
    close(&attention.lse, &[f64::from(378.10f32)], 1e-12);
}

#[test]
fn no_visible_key_is_zero_and_finite_bias_hides_nothing() {
    let none = ramp(3, 0, &Options::new());
    assert_eq!((none.out, none.lse), (vec![0.0; 3], vec![f64::NEG_INFINITY; 3]));
    // A03: the hidden entry beside f32::MIN; A02: f32::MIN everywhere is a constant.
    let run = |table: [f32; 3]| {
        let bias = Bias::new(Matrix::contiguous(&table, [1, 3]).unwrap()).unwrap();
        ramp(1, 3, &Options::new().bias(bias)).out[0]
    };
    assert_eq!(run([NI, f32::MIN, f32::MIN]), 2.5);
    assert_eq!(run([f32::MIN; 3]), 2.0);
    assert_eq!(run([NI; 3]), 0.0);
    assert!(run([NI, f32::NAN, 0.0]).is_nan());
    assert!(run([NI, f32::INFINITY, 0.0]).is_nan());
}

#[test]
fn hidden_is_unread_and_live_nan_shows() {
    // A08, A07.
    for bad in [1.0, 1e10, f32::NAN, f32::INFINITY] {
        for options in [Options::new().key_lengths(&[1]), Options::new().causal(Diagonal::TopLeft)] {
            assert_eq!(scores(&[0.5, bad], &[3.0, bad], options).out, [3.0]);
        }
    }
    // Live: K, then V, then Q of one row out of two.
    let nan = scores(&[0.0, f32::NAN, 0.0], &[1.0; 3], Options::new().key_lengths(&[2]));
    assert!(nan.out[0].is_nan() && nan.lse[0].is_nan());
    assert!(nan.weights[0].is_nan() && nan.weights[1].is_nan() && nan.weights[2] == 0.0);
    assert!(scores(&[0.0, -1e9], &[1.0, f32::NAN], Options::new()).out[0].is_nan());
    let (q, k) = ([f32::NAN, 0.0], [1.0, 1.0]);
    let [q, k] = [&q, &k].map(|data| Matrix::contiguous(data, [2, 1]).unwrap());
    let rows = sdpa(&q, &k, &k, &Options::new()).unwrap();
    assert!(rows.out[0].is_nan() && rows.out[1] == 1.0);
    // Infinite operands.
    assert!(scores(&[0.0, f32::INFINITY], &[1.0, 2.0], Options::new()).lse[0].is_nan());
    assert_eq!(scores(&[0.0, NI], &[1.0, 2.0], Options::new()).out, [1.0]);
    assert!(scores(&[NI, NI], &[1.0, 2.0], Options::new()).out[0].is_nan());
    assert_eq!(scores(&[NI, NI], &[1.0, 2.0], Options::new().sinks(&[3.0])).out, [0.0]);
}

#[test]
fn a31_groups_batches_and_layouts() {
    // 2 items, 4 query heads, 2 KV heads; V says which item and KV head it is.
    let q = vec![0.5f32; 2 * 4 * 3];
    let v: Vec<f32> = [0.0, 1.0, 10.0, 11.0].iter().flat_map(|&x| [x; 5]).collect();
    let (q, v) = (heads(&q, [2, 4, 3, 1]), heads(&v, [2, 2, 5, 1]));
    let grouped = multi_head(&q, &v, &v, &Options::new()).unwrap();
    let expected: Vec<f64> = [0.0, 0.0, 1.0, 1.0, 10.0, 10.0, 11.0, 11.0].iter().flat_map(|&x| [x; 3]).collect();
    close(&grouped.out, &expected, 1e-12);
    assert_eq!(grouped.averaged_weights().len(), 2 * 3 * 5);
    close(&grouped.averaged_weights(), &[0.2; 30], 1e-12);
    // (batch, seq, heads, dim) in bf16, and a V of stride 0 along seq.
    let q: Vec<bf16> = (0..2 * 3 * 4).map(|x| bf16::from_f32(x as f32 / 8.0)).collect();
    let copy: Vec<f32> = (0..24).map(|at| q[at / 12 * 12 + at % 3 * 4 + at / 3 % 4].to_f32()).collect();
    let strided = Heads::bshd(&q, [2, 3, 4, 1]).unwrap();
    let same = Heads::with_strides(&[1.0f32, 2.0, 3.0, 4.0], [2, 2, 5, 1], [2, 1, 0, 0]).unwrap();
    let lengths = [5, 2];
    let options = Options::new().causal(Diagonal::BottomRight).key_lengths(&lengths);
    let a = multi_head(&strided, &v, &same, &options).unwrap();
    assert_eq!(a, multi_head(&heads(&copy, [2, 4, 3, 1]), &v, &same, &options).unwrap());
    // Item 1 has 2 keys: its query 0 stands before the first.
    let per_item: Vec<f64> = [1.0, 1.0, 2.0, 2.0].iter().flat_map(|&x| [x; 3]).collect();
    close(&a.out[..12], &per_item, 1e-12);
    assert_eq!(a.out[12..15].iter().map(|x| (x * 1e9).round() / 1e9).collect::<Vec<_>>(), [0.0, 3.0, 3.0]);
    assert_eq!((a.lse[12], a.lse[3 * 4 + 3]), (f64::NEG_INFINITY, f64::NEG_INFINITY));
}

#[test]
fn agrees_with_the_rule_of_the_fast_paths() {
    let seen: Vec<bool> = (0..20).map(|x| x % 7 != 2).collect();
    let table: Vec<f32> = (0..10).map(|x| if x % 4 == 1 { NI } else { x as f32 }).collect();
    let mask = Mask::ignore(View::contiguous(&seen, [2, 1, 2, 5]).unwrap()).unwrap();
    let bias = Bias::new(View::contiguous(&table, [2, 1, 5]).unwrap()).unwrap();
    let diagonals = [-3, -1, 0, 2, isize::MAX].map(Diagonal::Offset);
    for diagonal in diagonals.into_iter().chain([Diagonal::TopLeft, Diagonal::BottomRight]) {
        for left in [None, Some(0), Some(2)] {
            for causal in [None, Some(Diagonal::TopLeft), Some(diagonal)] {
                for options in [Options::new(), Options::new().mask(mask), Options::new().bias(bias).mask(mask)] {
                    let window = Some(Window { left, right: Some(1), diagonal });
                    let options = Options { causal, window, key_lengths: Some(&[4, 5]), ..options };
                    let shape = |heads, seq| [2, heads, seq, 1];
                    let problem = Problem::new(shape(2, 2), shape(1, 5), shape(1, 5), &options).unwrap();
                    for at in 0..40 {
                        let index = [at / 20, at / 10 % 2, at / 5 % 2, at % 5];
                        let [b, h, i, j] = index;
                        assert_eq!(sees(&problem, index), problem.visible(b, h, i, j), "{options:?} {index:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn empty_axes_and_errors() {
    // A30.
    for (b, h, l, s, d) in [(0, 2, 3, 4, 5), (2, 0, 3, 4, 5), (2, 2, 0, 4, 5), (2, 2, 3, 0, 5), (2, 2, 3, 4, 0)] {
        let data = vec![1.0f32; 2 * 2 * 4 * 5];
        let view = |shape: [usize; 4]| heads(&data[..shape.iter().product()], shape);
        let (q, k) = (view([b, h, l, d]), view([b, h, s, d]));
        let run = |v, options: &Options<'_>| multi_head(&q, &k, &view([b, h, s, v]), options).unwrap();
        assert_eq!(run(3, &Options::new().softmax_scale(1.0)).out.len(), b * h * l * 3);
        let no_values = run(0, &Options::new().softmax_scale(1.0).causal(Diagonal::BottomRight));
        assert_eq!((no_values.out.len(), no_values.lse.len()), (0, b * h * l));
        assert_eq!(no_values.averaged_weights().len(), if h == 0 { 0 } else { b * l * s });
    }
    let huge = Heads::with_strides(&[1.0f32], [usize::MAX; 4], [0; 4]).unwrap();
    let result = multi_head(&huge, &huge, &huge, &Options::new());
    assert!(matches!(result, Err(Error::Overflow { operand: "lse", .. })), "{result:?}");
    let empty = Heads::with_strides(&[1.0f32; 0], [usize::MAX, 0, usize::MAX, 1], [0; 4]).unwrap();
    assert!(multi_head(&empty, &empty, &empty, &Options::new()).unwrap().averaged_weights().is_empty());
    let no_dim = Heads::with_strides(&[1.0f32; 0], [1, 1, 2, 0], [0; 4]).unwrap();
    assert_eq!(multi_head(&no_dim, &no_dim, &no_dim, &Options::new()).unwrap_err(), Error::NoDefaultScale);
}
