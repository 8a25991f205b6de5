//! Naive versions in `f64`, slow and plain: the oracle of this crate's tests, and of yours.
//!
//! Everything here is written from the definition, on one thread, with no block, no SIMD and no code of the fast paths;
//! what is shared with them is the check of shapes and options, so that both refuse the same calls with the same
//! errors. Products of `f32`, `f16` or `bf16` operands are exact in `f64`.

mod attention;

pub use attention::{Attention, multi_head, sdpa};

/// `alpha * A * B + beta * C` as a row-major `m` x `n` matrix; `a(row, column)`, `b` and `c` give the elements.
///
/// As in BLAS, `alpha == 0` never calls `a` or `b`, and `beta == 0` never calls `c`: what they hold, NaN included, does
/// not matter. With `k == 0` the product is zero, whatever `alpha` is.
///
/// ```
/// use polyhead::reference::gemm;
/// // A 2 x 1 times B 1 x 2.
/// let (a, b) = ([1.0, 2.0], [3.0, 4.0]);
/// let product = gemm(2, 2, 1, 10.0, |i, _| a[i], |_, j| b[j], 0.0, |_, _| f64::NAN);
/// assert_eq!(product, [30.0, 40.0, 60.0, 80.0]);
/// ```
#[expect(clippy::too_many_arguments, reason = "the arguments of BLAS gemm, in its order")]
pub fn gemm(
    m: usize,
    n: usize,
    k: usize,
    alpha: f64,
    a: impl Fn(usize, usize) -> f64,
    b: impl Fn(usize, usize) -> f64,
    beta: f64,
    c: impl Fn(usize, usize) -> f64,
) -> Vec<f64> {
    let element = |i, j| {
        let product = match alpha == 0.0 || k == 0 {
            true => 0.0,
            false => alpha * (0..k).map(|x| a(i, x) * b(x, j)).sum::<f64>(),
        };
        if beta == 0.0 { product } else { product + beta * c(i, j) }
    };
    // Rows of no elements are not counted through, there may be usize::MAX of them.
    let rows = if n == 0 { 0 } else { m };
    (0..rows).flat_map(|i| (0..n).map(move |j| (i, j))).map(|(i, j)| element(i, j)).collect()
}

/// Softmax of a row, or of the entries of it that `visible` marks.
///
/// * A hidden entry (or one past the end of `visible`) is never read and gives 0.
/// * A row of which nothing is visible, or only -inf, gives zeros, so that a masked row is harmless. `torch.softmax`
///   gives NaN.
/// * A visible NaN or +inf makes every visible entry NaN.
///
/// ```
/// use polyhead::reference::softmax;
/// assert_eq!(softmax(&[1.0, f64::NAN, 1.0], Some(&[true, false, true])), [0.5, 0.0, 0.5]);
/// assert_eq!(softmax(&[f64::NEG_INFINITY; 2], None), [0.0, 0.0]);
/// assert!(softmax(&[f64::INFINITY, 1.0], None).iter().all(|p| p.is_nan()));
/// ```
pub fn softmax(row: &[f64], visible: Option<&[bool]>) -> Vec<f64> {
    let (max, sum) = max_and_sum(row, visible);
    let weight = |x: f64| if max == f64::NEG_INFINITY { 0.0 } else { (x - max).exp() / sum };
    row.iter().enumerate().map(|(j, &x)| if is_visible(visible, j) { weight(x) } else { 0.0 }).collect()
}

/// Natural logarithm of [`softmax`], without its underflow.
///
/// A hidden entry is never read and gives -inf; a row of which nothing is visible, or only -inf, gives -inf everywhere
/// (the logarithm of softmax's zeros). A visible NaN or +inf makes every visible entry NaN.
///
/// ```
/// use polyhead::reference::log_softmax;
/// assert_eq!(log_softmax(&[0.0, -1000.0], None), [0.0, -1000.0]);
/// assert_eq!(log_softmax(&[f64::NEG_INFINITY; 2], None), [f64::NEG_INFINITY; 2]);
/// ```
pub fn log_softmax(row: &[f64], visible: Option<&[bool]>) -> Vec<f64> {
    let (max, sum) = max_and_sum(row, visible);
    // Not x - log_sum_exp(row): a large maximum would swallow the logarithm.
    let weight = |x: f64| if max == f64::NEG_INFINITY { max } else { x - max - sum.ln() };
    let hidden = f64::NEG_INFINITY;
    row.iter().enumerate().map(|(j, &x)| if is_visible(visible, j) { weight(x) } else { hidden }).collect()
}

/// Natural logarithm of the sum of the exponentials of a row's visible entries, without overflow.
///
/// -inf if nothing is visible, or only -inf; NaN if a visible entry is NaN; otherwise +inf if one is +inf, which is
/// what the sum is (although [`softmax`] of that row is NaN).
///
/// ```
/// use polyhead::reference::log_sum_exp;
/// assert_eq!(log_sum_exp(&[1000.0, 1000.0], None), 1000.0 + f64::ln(2.0));
/// assert_eq!(log_sum_exp(&[], None), f64::NEG_INFINITY);
/// assert_eq!(log_sum_exp(&[f64::INFINITY, 1.0], None), f64::INFINITY);
/// ```
pub fn log_sum_exp(row: &[f64], visible: Option<&[bool]>) -> f64 {
    match max_and_sum(row, visible) {
        // x - max was NaN.
        (max, _) if max.is_infinite() => max,
        (max, sum) => max + sum.ln(),
    }
}

/// The largest visible entry (NaN if one is NaN, -inf if there is none), and the sum of all `exp(x - max)`: NaN if a
/// visible entry is NaN or +inf.
fn max_and_sum(row: &[f64], visible: Option<&[bool]>) -> (f64, f64) {
    let seen = || row.iter().enumerate().filter(|&(j, _)| is_visible(visible, j)).map(|(_, &x)| x);
    let max = match seen().any(f64::is_nan) {
        true => f64::NAN,
        false => seen().fold(f64::NEG_INFINITY, f64::max),
    };
    (max, seen().map(|x| (x - max).exp()).sum())
}

fn is_visible(visible: Option<&[bool]>, j: usize) -> bool {
    visible.is_none_or(|visible| visible.get(j).copied().unwrap_or(false))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NI: f64 = f64::NEG_INFINITY;

    fn close(actual: &[f64], expected: &[f64]) {
        assert_eq!(actual.len(), expected.len());
        for (a, e) in actual.iter().zip(expected) {
            assert!(a == e || (a.is_nan() && e.is_nan()) || (a - e).abs() < 1e-12, "{actual:?} {expected:?}");
        }
    }

    fn unread(_: usize, _: usize) -> f64 {
        panic!("must not be read")
    }

    #[test]
    fn gemm_by_hand() {
        let a = |i: usize, k: usize| [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]][i][k];
        let b = |k: usize, j: usize| [[7.0, 8.0], [9.0, 10.0]][k][j];
        let c = |i: usize, j: usize| (10 * i + j) as f64;
        assert_eq!(gemm(3, 2, 2, 1.0, a, b, 0.0, unread), [25.0, 28.0, 57.0, 64.0, 89.0, 100.0]);
        assert_eq!(gemm(3, 2, 2, 2.0, a, b, -1.0, c), [50.0, 55.0, 104.0, 117.0, 158.0, 179.0]);
        assert_eq!(gemm(3, 2, 2, 0.0, unread, unread, 2.0, c), [0.0, 2.0, 20.0, 22.0, 40.0, 42.0]);
        assert_eq!(gemm(2, 1, 2, 0.0, unread, unread, 0.0, unread), [0.0, 0.0]);
        // A28, A55.
        assert_eq!(gemm(1, 1, 2, 1.0, |_, k| [1.0, 2.0][k], |k, _| [1.0, 2.0][k], 0.0, unread), [5.0]);
        assert_eq!(gemm(8, 1, 0, f64::INFINITY, unread, unread, 0.0, unread), [0.0; 8]);
        assert_eq!(gemm(3, 2, 0, 1.0, unread, unread, 1.0, c), [0.0, 1.0, 10.0, 11.0, 20.0, 21.0]);
        assert_eq!(gemm(usize::MAX, 0, 3, 1.0, unread, unread, 1.0, unread), [0.0; 0]);
    }

    #[test]
    fn softmax_by_hand() {
        close(&softmax(&[0.0, 2f64.ln(), 5f64.ln()], None), &[0.125, 0.25, 0.625]);
        // A53: exponentials that overflow without the maximum.
        close(&softmax(&[-249.87, -424.13, -460.29, 378.10, -292.61], None), &[0.0, 0.0, 0.0, 1.0, 0.0]);
        // A46: 800, -inf, 0 and -0.
        close(&softmax(&[800.0, NI, 0.0, -0.0], None), &[1.0, 0.0, 0.0, 0.0]);
        close(&log_softmax(&[800.0, NI, 0.0], None), &[0.0, NI, -800.0]);
        assert_eq!(log_sum_exp(&[NI, -0.0, 0.0], None), 2f64.ln());
        close(&softmax(&[f64::MAX, f64::MIN], None), &[1.0, 0.0]);
        close(&softmax(&[1e300, 1e300], None), &[0.5, 0.5]);
        close(&log_softmax(&[1e300, 1e300], None), &[0.5f64.ln(); 2]);
        assert!(softmax(&[], None).is_empty() && log_softmax(&[], None).is_empty());
    }

    #[test]
    fn rows_that_are_not_numbers() {
        // A48, A49, A50.
        for len in 1..=70 {
            close(&softmax(&vec![NI; len], None), &vec![0.0; len]);
            close(&log_softmax(&vec![NI; len], None), &vec![NI; len]);
            assert_eq!(log_sum_exp(&vec![NI; len], None), NI);
            for bad in [f64::NAN, f64::INFINITY] {
                for at in [0, len / 2, len - 1] {
                    let mut row = vec![1.0; len];
                    row[at] = bad;
                    close(&softmax(&row, None), &vec![f64::NAN; len]);
                    close(&log_softmax(&row, None), &vec![f64::NAN; len]);
                    close(&[log_sum_exp(&row, None)], &[bad]);
                }
            }
        }
        close(&softmax(&[f64::INFINITY, NI, f64::INFINITY], None), &[f64::NAN; 3]);
        close(&[log_sum_exp(&[f64::INFINITY, f64::NAN], None)], &[f64::NAN]);
    }

    #[test]
    fn hidden_entries_do_not_count() {
        for hidden in [f64::NAN, f64::INFINITY, NI, 1e300] {
            let row = [0.0, hidden, 3f64.ln(), hidden];
            let visible = [true, false, true];
            close(&softmax(&row, Some(&visible)), &[0.25, 0.0, 0.75, 0.0]);
            close(&log_softmax(&row, Some(&visible)), &[0.25f64.ln(), NI, 0.75f64.ln(), NI]);
            close(&[log_sum_exp(&row, Some(&visible))], &[4f64.ln()]);
            close(&softmax(&row, Some(&[false; 4])), &[0.0; 4]);
            close(&log_softmax(&row, Some(&[])), &[NI; 4]);
            close(&softmax(&[f64::NAN, 1.0, hidden], Some(&visible[..2])), &[f64::NAN, 0.0, 0.0]);
        }
    }
}
