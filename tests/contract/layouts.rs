use polyhead::{Bias, Diagonal, Heads, HeadsMut, Mask, Matrix, Options, View, multi_head};

use crate::oracle::{ALL_F32, Call, Places, TYPES, Wanted, shape};
use crate::support::{Arrangement, Rng, assert_all_close, assert_same_bits, levels};

/// A19, A20, A22, A26, A27: each operand in each arrangement, and all of them, bit for bit as packed.
#[test]
fn any_layout() {
    let mut rng = Rng::new(91);
    let sizes =
        [[2, 3, 3, 33, 65, 24, 17], [3, 4, 2, 1, 40, 8, 1], [1, 2, 1, 62, 129, 5, 64], [2, 1, 1, 5, 16, 128, 128]];
    for (at, sizes) in sizes.into_iter().enumerate() {
        for types in [TYPES[at], TYPES[at + 4]] {
            let mut call = Call::random(shape(sizes), types, &mut rng);
            call.options.causal = Some(Diagonal::BottomRight);
            for place in Arrangement::ALL {
                let distinct = if Arrangement::DISTINCT.contains(&place) { place } else { Arrangement::Bhsd };
                let packed = Places::PACKED;
                let all = Places { q: place, k: place, v: place, out: distinct, weights: distinct };
                for places in [
                    Places { q: place, ..packed },
                    Places { k: place, ..packed },
                    Places { v: place, ..packed },
                    Places { out: distinct, weights: distinct, ..packed },
                    all,
                ] {
                    let strided = call.clone().places(places);
                    // A broadcast has changed the values: the packed copy is of the new ones.
                    let copy = Call { places: packed, ..strided.clone() };
                    for &level in levels() {
                        let (strided, copy) = (strided.run(level, Wanted::Weights), copy.run(level, Wanted::Weights));
                        strided.assert_same_bits(&copy, format_args!("{places:?} {types:?} on {}", level.name()));
                    }
                }
            }
        }
    }
}

/// Rows as far apart as a set of the L1 cache holds, which are copied, and not quite.
#[test]
fn any_layout_with_rows_a_page_apart() {
    let mut rng = Rng::new(92);
    for stride in [1024, 1025, 2048, 4096 + 16] {
        let call = Call::random(shape([1, 2, 1, 10, 20, 16, 16]), ALL_F32, &mut rng);
        let gap = Arrangement::RowGaps(stride - 16);
        let strided = call.clone().places(Places { q: gap, k: gap, v: gap, ..Places::PACKED });
        let expected = call.expected();
        for &level in levels() {
            let results = strided.check(level, &expected, format_args!("rows {stride} apart"));
            let packed = call.clone().places(Places::PACKED).run(level, Wanted::Weights);
            results.assert_same_bits(&packed, format_args!("rows {stride} apart on {}", level.name()));
        }
    }
}

/// A28, A35: strides of axes of size 0 and 1 are never used.
#[test]
fn any_layout_ignores_strides_of_axes_of_one() {
    let (q, k, v) = ([0.5f32, -1.0], [1.0f32, 2.0, 3.0, 4.0], [1.0f32, 5.0]);
    for stride in [0, 1, 77, 1 << 31, usize::MAX / 4 + 1, usize::MAX] {
        for &level in levels() {
            let mut out = [f32::NAN; 1];
            multi_head(
                &Heads::with_strides(&q, [1, 1, 1, 2], [stride, stride, stride, 1]).unwrap(),
                &Heads::with_strides(&k, [1, 1, 2, 2], [stride, stride, 2, 1]).unwrap(),
                &Heads::with_strides(&v, [1, 1, 2, 1], [stride, stride, 1, stride]).unwrap(),
                HeadsMut::with_strides(&mut out, [1, 1, 1, 1], [stride; 4]).unwrap(),
                &Options::new().softmax_scale(2.0).level(level),
            )
            .unwrap();
            // Scores -3 and -5.
            let first = 1.0 / (1.0 + (-2f64).exp());
            assert_all_close(&out, &[first + 5.0 * (1.0 - first)], 1e-6, 0.0, format_args!("stride {stride}"));
            let nothing = Heads::<f32>::with_strides(&[], [1, 1, 0, 2], [stride; 4]).unwrap();
            multi_head(
                &Heads::with_strides(&q, [1, 1, 1, 2], [stride, stride, stride, 1]).unwrap(),
                &nothing,
                &Heads::<f32>::with_strides(&[], [1, 1, 0, 1], [stride; 4]).unwrap(),
                HeadsMut::with_strides(&mut out, [1, 1, 1, 1], [stride; 4]).unwrap(),
                &Options::new().level(level),
            )
            .unwrap();
            assert_eq!(out, [0.0]);
        }
    }
}

/// A23, A24: masks and biases of one to four axes, transposed, with gaps, broadcast by size 1 or by stride 0, of any polarity.
#[test]
fn any_layout_of_masks_and_biases() {
    let (b, h, l, s) = (2, 3, 19, 67);
    let call = Call::random(shape([b, h, h, l, s, 6, 4]), ALL_F32, &mut Rng::new(93));
    // Storage for any of the views below; about a fifth is hidden.
    let mut rng = Rng::new(94);
    let bools = rng.bools(2 * b * h * l * s, 0.8);
    let flipped: Vec<bool> = bools.iter().map(|x| !x).collect();
    let floats: Vec<f32> = bools.iter().map(|&seen| if seen { rng.normal() } else { f32::NEG_INFINITY }).collect();
    let cases: [([usize; 4], [usize; 4]); 11] = [
        ([b, h, l, s], [h * l * s, l * s, s, 1]),
        ([b, h, l, s], [h * l * s, l * s, 1, l]),
        ([b, h, l, s], [1, b, b * h * s, b * h]),
        ([b, h, l, s], [2 * h * l * s, 2 * l * s, 2 * s, 2]),
        ([b, h, l, s], [0, 0, s, 1]),
        ([b, h, l, s], [7, 0, 0, 1]),
        ([b, h, l, s], [0, 5, 3, 0]),
        ([b, 1, 1, s], [s, 77, 77, 1]),
        ([1, h, l, 1], [usize::MAX, l, 1, usize::MAX]),
        ([1, 1, l, 1], [1, 1, 2, 77]),
        ([1, 1, 1, 1], [usize::MAX; 4]),
    ];
    for (shape, strides) in cases {
        let index = |at: [usize; 4]| -> usize { (0..4).filter(|&x| shape[x] > 1).map(|x| at[x] * strides[x]).sum() };
        let full: Vec<[usize; 4]> =
            (0..b * h * l * s).map(|x| [x / s / l / h, x / s / l % h, x / s % l, x % s]).collect();
        let copy: Vec<bool> = full.iter().map(|&at| bools[index(at)]).collect();
        let copied: Vec<f32> = full.iter().map(|&at| floats[index(at)]).collect();
        let packed = |level| Options::new().level(level);
        for &level in levels() {
            let view = |data| Mask::attend(View::contiguous(data, [b, h, l, s]).unwrap()).unwrap();
            let expected = call.output(&packed(level).mask(view(&copy)));
            let strided = Mask::attend(View::with_strides(&bools, shape, strides).unwrap()).unwrap();
            let context = format!("{shape:?} {strides:?} on {}", level.name());
            assert_same_bits(&call.output(&packed(level).mask(strided)), &expected, &context);
            let ignore = Mask::ignore(View::with_strides(&flipped, shape, strides).unwrap()).unwrap();
            assert_same_bits(&call.output(&packed(level).mask(ignore)), &expected, &context);
            let bias = Bias::new(View::contiguous(&copied, [b, h, l, s]).unwrap()).unwrap();
            let expected = call.output(&packed(level).bias(bias));
            let bias = Bias::new(View::with_strides(&floats, shape, strides).unwrap()).unwrap();
            assert_same_bits(&call.output(&packed(level).bias(bias)), &expected, &context);
        }
    }
}

/// Fewer axes are aligned at the right.
#[test]
fn any_layout_of_masks_is_aligned_at_the_right() {
    let (b, h, l, s) = (2, 2, 4, 5);
    let call = Call::random(shape([b, h, h, l, s, 6, 4]), ALL_F32, &mut Rng::new(95));
    let bools = Rng::new(96).bools(h * l * s, 0.7);
    for &level in levels() {
        let run = |mask: polyhead::Result<Mask<'_>>| call.output(&Options::new().level(level).mask(mask.unwrap()));
        let four = |shape: [usize; 4]| run(Mask::attend(View::with_strides(&bools, shape, [0, l * s, s, 1]).unwrap()));
        let one = run(Mask::attend(View::<_, 1>::contiguous(&bools[..s], [s]).unwrap()));
        assert_same_bits(&one, &four([1, 1, 1, s]), "one axis");
        let two = run(Mask::attend(Matrix::contiguous(&bools[..l * s], [l, s]).unwrap()));
        assert_same_bits(&two, &four([1, 1, l, s]), "two axes");
        let three = run(Mask::attend(View::<_, 3>::contiguous(&bools, [h, l, s]).unwrap()));
        assert_same_bits(&three, &four([1, h, l, s]), "three axes");
        // No axis at all: one value for everything. The first is what it is, so that the others differ from it.
        let none = run(Mask::attend(View::<_, 0>::contiguous(&[false], []).unwrap()));
        assert_eq!(none, vec![0.0; b * h * l * 4]);
    }
}

/// Slices that start 4 bytes off any vector boundary (A63).
#[test]
fn any_layout_at_any_alignment() {
    let base = Call::random(shape([1, 2, 2, 17, 35, 16, 16]), ALL_F32, &mut Rng::new(97));
    for &level in levels() {
        let expected = base.clone().places(Places::PACKED).run(level, Wanted::Lse).out;
        for off in 0..4 {
            let shift = |data: &[f32]| [vec![f32::NAN; off], data.to_vec()].concat();
            let (q, k, v) = (shift(&base.q), shift(&base.k), shift(&base.v));
            let mut out = vec![f32::NAN; off + base.q.len()];
            multi_head(
                &Heads::bhsd(&q[off..], [1, 2, 17, 16]).unwrap(),
                &Heads::bhsd(&k[off..], [1, 2, 35, 16]).unwrap(),
                &Heads::bhsd(&v[off..], [1, 2, 35, 16]).unwrap(),
                HeadsMut::bhsd(&mut out[off..], [1, 2, 17, 16]).unwrap(),
                &Options::new().level(level),
            )
            .unwrap();
            assert_same_bits(&out[off..], &expected, format_args!("{off} elements off on {}", level.name()));
        }
    }
}
