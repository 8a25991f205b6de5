//! Any shape, layout, mask and bits against the reference; nothing outside the view may change.
#![no_main]

use arbitrary::Arbitrary;
use half::{bf16, f16};
use libfuzzer_sys::fuzz_target;
use polyhead::softmax::{SoftmaxOptions, log_softmax, log_sum_exp, softmax, softmax_in_place};
use polyhead::{Element, Level, Mask, Matrix, MatrixMut, reference};

#[derive(Arbitrary, Debug)]
struct Input {
    rows: u8,
    columns: u16,
    element: u8,
    level: u8,
    /// Of input and output: by columns, and what lies between.
    layouts: [(bool, u8); 2],
    /// Whether it broadcasts each axis, and its polarity.
    mask: Option<([bool; 2], bool)>,
    /// Bits of the elements, repeated.
    bits: Vec<u32>,
    flags: Vec<bool>,
}

/// What nothing computes.
const UNTOUCHED: f32 = -12345.0;

fn strides((by_columns, gap): (bool, u8), [rows, columns]: [usize; 2]) -> [usize; 2] {
    let gap = usize::from(gap % 4);
    if by_columns { [1, rows + gap] } else { [columns + gap, 1] }
}

fn storage(shape: [usize; 2], strides: [usize; 2]) -> usize {
    shape.iter().zip(strides).map(|(n, stride)| n.saturating_sub(1) * stride).sum::<usize>() + 20
}

fn check<T: Element>(input: &Input, rounding: (f64, f64)) {
    let shape @ [rows, columns] = [usize::from(input.rows % 12), usize::from(input.columns % 4500)];
    let bits = |i: usize| input.bits.get(i % input.bits.len().max(1)).copied().unwrap_or(0);
    let value = |i: usize| T::from_f32_nearest(f32::from_bits(bits(i)));
    let [from, to] = input.layouts.map(|layout| strides(layout, shape));
    let mut x = vec![T::from_f32_nearest(f32::NAN); storage(shape, from)];
    for i in 0..rows * columns {
        x[i / columns * from[0] + i % columns * from[1]] = value(i);
    }
    let x = Matrix::with_strides(&x, shape, from).expect("fits");
    let mask_shape = match input.mask {
        Some((one, _)) => [if one[0] { 1 } else { rows }, if one[1] { 1 } else { columns }],
        None => [0, 0],
    };
    let flag = |i: usize| input.flags.get(i % input.flags.len().max(1)).copied().unwrap_or(true);
    let flags: Vec<bool> = (0..mask_shape[0] * mask_shape[1]).map(flag).collect();
    let mut options =
        SoftmaxOptions::new().level(Level::available()[usize::from(input.level) % Level::available().len()]);
    if let Some((_, attend)) = input.mask {
        let view = Matrix::contiguous(&flags, mask_shape).expect("packed");
        options = options.mask(if attend { Mask::attend(view) } else { Mask::ignore(view) }.expect("two axes"));
    }
    let blank = vec![T::from_f32_nearest(UNTOUCHED); storage(shape, to)];
    let (mut p, mut log_p, mut lse) = (blank.clone(), blank.clone(), vec![0.0f32; rows]);
    softmax(&x, MatrixMut::with_strides(&mut p, shape, to).expect("fits"), &options).expect("valid");
    log_softmax(&x, MatrixMut::with_strides(&mut log_p, shape, to).expect("fits"), &options).expect("valid");
    log_sum_exp(&x, &mut lse, &options).expect("valid");
    let mut in_place = blank;
    for i in 0..rows * columns {
        in_place[i / columns * to[0] + i % columns * to[1]] = value(i);
    }
    softmax_in_place(MatrixMut::with_strides(&mut in_place, shape, to).expect("fits"), &options).expect("valid");
    for row in 0..rows {
        let wide: Vec<f64> = (0..columns).map(|j| value(row * columns + j).to_f32().into()).collect();
        let seen = input.mask.map(|(_, attend)| -> Vec<bool> {
            let at = |j: usize| row % mask_shape[0] * mask_shape[1] + j % mask_shape[1];
            (0..columns).map(|j| flags[at(j)] == attend).collect()
        });
        let seen = seen.as_deref();
        let exact = reference::log_sum_exp(&wide, seen);
        let close = |actual: f32, expected: f64, tolerance: f64, rounding: (f64, f64)| {
            let nearest = T::from_f32_nearest(expected as f32).to_f32();
            let allowed = tolerance + rounding.0 * expected.abs() + rounding.1;
            let same = actual == nearest || (actual.is_nan() && nearest.is_nan());
            assert!(
                same || (f64::from(actual) - expected).abs() <= allowed,
                "{actual:e} is not {expected:e}: {input:?}"
            );
        };
        // In units of 2^-24, as tests/softmax.rs derives it.
        let units = |size: f64| (40.0 + 3.0 * size) / 16_777_216.0;
        let lse_f32 = f64::from(exact as f32);
        close(lse[row], if lse_f32.is_infinite() { lse_f32 } else { exact }, units(exact.abs()), (0.0, 0.0));
        let (softmax, log_softmax) = (reference::softmax(&wide, seen), reference::log_softmax(&wide, seen));
        for j in 0..columns {
            let at = row * to[0] + j * to[1];
            let off = units((exact - wide[j]).abs() + 10.0);
            close(p[at].to_f32(), softmax[j], off * softmax[j] + f64::from(f32::MIN_POSITIVE), rounding);
            close(log_p[at].to_f32(), log_softmax[j], off, rounding);
            let (a, b) = (p[at].to_f32(), in_place[at].to_f32());
            assert_eq!(a.to_bits(), b.to_bits(), "in place: {input:?}");
            (p[at], log_p[at]) = (T::from_f32_nearest(UNTOUCHED), T::from_f32_nearest(UNTOUCHED));
        }
    }
    assert!(p.iter().chain(&log_p).all(|&x| x == T::from_f32_nearest(UNTOUCHED)), "between rows: {input:?}");
}

fuzz_target!(|input: Input| match input.element % 3 {
    0 => check::<f32>(&input, (0.0, 0.0)),
    1 => check::<f16>(&input, (f64::exp2(-11.0), f64::exp2(-25.0))),
    _ => check::<bf16>(&input, (f64::exp2(-8.0), f64::exp2(-134.0))),
});
